"""nxdpp: pipeline-parallel training of unmodified PyTorch and Hugging Face models.

::

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = nxdpp.NxDPPModel(module, num_microbatches=4)
    model.move_model_to_device()
    optimizer = torch.optim.AdamW(model.local_parameters())
    loss = model.run_train(**batch)

Each name has its own help, as ``help(nxdpp.NxDPPModel)``. Names are imported at their first use: ``import nxdpp`` and
``nxdpp.schedules`` need no torch.

Names::

    GradScaler                     torch's GradScaler over all ranks
    LoadReport                     Differences between a checkpoint and the whole model that it was loaded into
    MetricsFile                    Metrics of this rank's steps, which python -m nxdpp watch FOLDER shows
    NxDPPModel                     A model that a pipeline of ranks trains, each of which holds some of its layers
    TracedLayers                   Transformer layers of a model, in the order of execution
    apply_checkpoint               Recompute the forward of layers during their backward
    apply_compile                  Compile this rank's layers, embeddings, norms and heads with torch.compile
    batches_of_tokens              Return rows in groups of at most a number of tokens
    check_tensor_parallel          Compare model divided by plan with model in one process
    compare_tensor_copies          Make calls of module with gradients compare its copies
    context_parallelize            Divide the tokens of each sequence over the ranks of the context group
    data_parallel_sampler          Return a sampler that gives this rank's replica its part of dataset
    declare_optimizer              Tell what a step of optimizer_class looks at
    deferred_init                  Call constructor(*args, **kwargs) without memory for its parameters and buffers
    device_memory                  Return the bytes of memory of an accelerator
    expert_parallelize             Divide the experts of model over the ranks of the expert group
    finalize_checkpoint            Wait until the save in flight is at its end
    fully_shard                    Keep of each parameter, gradient and optimizer state only this replica's rows
    gather_state_dict              Return the state dict of the whole model on rank 0
    has_checkpoint                 Return whether path has a checkpoint that was saved to its end
    init_on_device                 Build modules with their parameters on device
    initialize_parallel_model      Build model_fn(*model_args, **model_kwargs) and wrap it for training
    initialize_parallel_optimizer  Make an optimizer whose step does the rest of a training step
    load_checkpoint                Load what save_checkpoint has saved in any layout of ranks
    load_pretrained                Load this rank's part of the Hugging Face directory into a wrapped model
    neuronx_distributed_config     Return the configuration of a training
    plan                           Return the layouts of a job with the shortest steps
    recorded_routing               Record the experts that tokens choose in a block
    replayed_routing               Give tokens in a block the experts of a record
    save_checkpoint                Save a training in path/tag, for any layout of ranks to load
    save_pretrained                Write a wrapped model to directory in the format of transformers
    tensor_parallelize             Divide the linear layers and embeddings of model over the tensor-parallel ranks
    tensor_plan                    Return the style of each module by name pattern
    trace_layers                   Trace module and return its transformer layers

Modules::

    integrations                   Other libraries' trainers over a pipeline
    kernels                        Attention at the import paths of NeuronX Distributed
    modules                        Modules of several tensor-parallel layers
    nnscaler                       nnScaler's ways in
    optimizer                      Optimizers whose state is sharded over the data-parallel replicas
    oslo                           OSLO's ways in
    overrides                      Functions of Llama models at the import paths of NeuronX Distributed
    parallel_layers                Tensor-parallel layers, process groups, the failure watch
    parallel_state                 Process groups of tensor, data and pipeline parallelism
    pipeline                       Pipeline runtime
    schedules                      Schedules as data
    scripts                        Scripts of NeuronX Distributed
    trainer                        Trainer API of NeuronX Distributed
    utils                          Import paths of NeuronX Distributed
"""

import sys
from typing import TYPE_CHECKING, Any

__all__ = [
    "GradScaler",
    "LoadReport",
    "MetricsFile",
    "NxDPPModel",
    "TracedLayers",
    "apply_checkpoint",
    "apply_compile",
    "batches_of_tokens",
    "check_tensor_parallel",
    "compare_tensor_copies",
    "context_parallelize",
    "data_parallel_sampler",
    "declare_optimizer",
    "deferred_init",
    "device_memory",
    "expert_parallelize",
    "finalize_checkpoint",
    "fully_shard",
    "gather_state_dict",
    "has_checkpoint",
    "init_on_device",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "load_pretrained",
    "neuronx_distributed_config",
    "parallel_state",
    "plan",
    "recorded_routing",
    "replayed_routing",
    "save_checkpoint",
    "save_pretrained",
    "tensor_parallelize",
    "tensor_plan",
    "trace_layers",
]
_PACKAGES = (
    "integrations",
    "kernels",
    "modules",
    "nnscaler",
    "optimizer",
    "oslo",
    "overrides",
    "parallel_layers",
    "pipeline",
    "schedules",
    "scripts",
    "trainer",
    "utils",
)

if TYPE_CHECKING:
    from nxdpp.packages import *
    from nxdpp.public import *

    __version__: str
else:
    # Type checkers do not see this, so they report names that do not exist.
    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            from nxdpp import packages as module
        elif name == "__version__":
            from nxdpp import version as module
        elif name in ("GradScaler", "NxDPPModel", "parallel_state"):
            # Most programs need no more: the planner, checkpoints and doors are a third of the imports.
            from nxdpp.pipeline import model as module
        elif name in __all__:
            from nxdpp import public as module
        else:
            # Python adds the name that is meant.
            raise AttributeError(f"module 'nxdpp' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        return getattr(module, name)

    def __dir__() -> list[str]:
        return sorted([*__all__, *_PACKAGES, "__version__"])
