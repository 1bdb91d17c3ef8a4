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
    NxDPPModel                     A model that a pipeline of ranks trains, each of which holds some of its layers
    Pipeline                       A module cut into stages, of which this rank holds and runs its own
    PipelineConfig                 Settings of a Pipeline, equal on all ranks
    TracedLayers                   Transformer layers of a model, in the order of execution
    apply_checkpoint               Recompute the forward of layers during their backward
    check_tensor_parallel          Compare model divided by plan with model in one process
    compare_tensor_copies          Make calls of module with gradients compare its copies
    data_parallel_sampler          Return a sampler that gives this rank's replica its part of dataset
    deferred_init                  Call constructor(*args, **kwargs) without memory for its parameters and buffers
    device_memory                  Return the bytes of memory of a CUDA device here
    finalize_checkpoint            Wait until the save in flight is at its end
    gather_state_dict              Return the state dict of the whole model on rank 0
    has_checkpoint                 Return whether path has a checkpoint that was saved to its end
    init_on_device                 Build modules with their parameters on device
    initialize_parallel_model      Build model_fn(*model_args, **model_kwargs) and wrap it for training
    initialize_parallel_optimizer  Make an optimizer whose step does the rest of a training step
    load_checkpoint                Load what save_checkpoint has saved in any layout of ranks
    load_pretrained                Load this rank's part of the Hugging Face directory into a wrapped model
    neuronx_distributed_config     Return the configuration of a training
    plan                           Return the layouts of a job with the shortest steps
    save_checkpoint                Save a training in path/tag, for any layout of ranks to load
    save_pretrained                Write a wrapped model to directory in the format of transformers
    tensor_parallelize             Divide the linear layers and embeddings of model over the tensor-parallel ranks
    tensor_plan                    Return the style of each module by name pattern
    trace_layers                   Trace module and return its transformer layers

Modules::

    integrations                   Other libraries' trainers over a pipeline
    modules                        Modules of several tensor-parallel layers
    nnscaler                       nnScaler's ways in
    optimizer                      Optimizers whose state is sharded over the data-parallel replicas
    oslo                           OSLO's ways in
    parallel_layers                Tensor-parallel layers, process groups, the failure watch
    parallel_state                 Process groups of tensor, data and pipeline parallelism
    pipeline                       Pipeline runtime
    schedules                      Schedules as data
    trainer                        Trainer API of NeuronX Distributed
    utils                          Import paths of NeuronX Distributed
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # nnscaler and oslo import this module: a program imports them by their full names.
    from nxdpp import integrations as integrations
    from nxdpp import modules as modules
    from nxdpp import optimizer as optimizer
    from nxdpp import parallel_layers as parallel_layers
    from nxdpp import pipeline as pipeline
    from nxdpp import schedules as schedules
    from nxdpp import trainer as trainer
    from nxdpp import utils as utils
    from nxdpp.checkpoint.distributed.whole_state import gather_state_dict as gather_state_dict
    from nxdpp.checkpoint.huggingface.load import load_pretrained as load_pretrained
    from nxdpp.checkpoint.huggingface.load_report import LoadReport as LoadReport
    from nxdpp.checkpoint.huggingface.save import save_pretrained as save_pretrained
    from nxdpp.devices.memory import device_memory as device_memory
    from nxdpp.initialization.deferred_init import deferred_init as deferred_init
    from nxdpp.initialization.init_on_device import init_on_device as init_on_device
    from nxdpp.parallel_layers import parallel_state as parallel_state
    from nxdpp.parallel_layers.data_parallel_sampler import data_parallel_sampler as data_parallel_sampler
    from nxdpp.parallel_layers.grad_scaler import GradScaler as GradScaler
    from nxdpp.pipeline.activation_checkpoint import apply_checkpoint as apply_checkpoint
    from nxdpp.pipeline.config import PipelineConfig as PipelineConfig
    from nxdpp.pipeline.model import NxDPPModel as NxDPPModel
    from nxdpp.pipeline.pipeline import Pipeline as Pipeline
    from nxdpp.pipeline.planning.planner import plan as plan
    from nxdpp.pipeline.replicas.tensor_copies import compare_tensor_copies as compare_tensor_copies
    from nxdpp.pipeline.traced_layers import TracedLayers as TracedLayers
    from nxdpp.pipeline.traced_layers import trace_layers as trace_layers
    from nxdpp.tensor_parallel.comparison import check_tensor_parallel as check_tensor_parallel
    from nxdpp.tensor_parallel.known_plan import tensor_plan as tensor_plan
    from nxdpp.tensor_parallel.parallelize import tensor_parallelize as tensor_parallelize
    from nxdpp.trainer.checkpoint import finalize_checkpoint as finalize_checkpoint
    from nxdpp.trainer.checkpoint import has_checkpoint as has_checkpoint
    from nxdpp.trainer.checkpoint import load_checkpoint as load_checkpoint
    from nxdpp.trainer.checkpoint import save_checkpoint as save_checkpoint
    from nxdpp.trainer.config import neuronx_distributed_config as neuronx_distributed_config
    from nxdpp.trainer.optimizer import initialize_parallel_optimizer as initialize_parallel_optimizer
    from nxdpp.trainer.trainer import initialize_parallel_model as initialize_parallel_model

    __version__: str
else:
    # Without a ``__getattr__`` type checkers report names that do not exist.
    _MODULES = {
        "GradScaler": "parallel_layers.grad_scaler",
        "LoadReport": "checkpoint.huggingface.load_report",
        "NxDPPModel": "pipeline.model",
        "Pipeline": "pipeline.pipeline",
        "PipelineConfig": "pipeline.config",
        "TracedLayers": "pipeline.traced_layers",
        "apply_checkpoint": "pipeline.activation_checkpoint",
        "check_tensor_parallel": "tensor_parallel.comparison",
        "compare_tensor_copies": "pipeline.replicas.tensor_copies",
        "data_parallel_sampler": "parallel_layers.data_parallel_sampler",
        "deferred_init": "initialization.deferred_init",
        "device_memory": "devices.memory",
        "finalize_checkpoint": "trainer.checkpoint",
        "gather_state_dict": "checkpoint.distributed.whole_state",
        "has_checkpoint": "trainer.checkpoint",
        "init_on_device": "initialization.init_on_device",
        "initialize_parallel_model": "trainer.trainer",
        "initialize_parallel_optimizer": "trainer.optimizer",
        "load_checkpoint": "trainer.checkpoint",
        "load_pretrained": "checkpoint.huggingface.load",
        "neuronx_distributed_config": "trainer.config",
        "parallel_state": "parallel_layers",
        "plan": "pipeline.planning.planner",
        "save_checkpoint": "trainer.checkpoint",
        "save_pretrained": "checkpoint.huggingface.save",
        "tensor_parallelize": "tensor_parallel.parallelize",
        "tensor_plan": "tensor_parallel.known_plan",
        "trace_layers": "pipeline.traced_layers",
    }
    _PACKAGES = (
        "integrations",
        "modules",
        "nnscaler",
        "optimizer",
        "oslo",
        "parallel_layers",
        "pipeline",
        "schedules",
        "trainer",
        "utils",
    )

    __all__ = sorted(_MODULES)

    def __getattr__(name):
        if name in _PACKAGES:
            return import_module(f"nxdpp.{name}")
        if name in _MODULES:
            return getattr(import_module(f"nxdpp.{_MODULES[name]}"), name)
        if name == "__version__":
            return import_module("nxdpp.version").__version__
        raise AttributeError(f"module 'nxdpp' has no attribute {name!r}{_suggestion(name)}")

    def __dir__():
        return sorted((*__all__, *_PACKAGES, "__version__"))

    def _suggestion(name):
        # Libraries ask for attributes such as __path__: no help for those.
        if name.startswith("_"):
            return ""
        from difflib import get_close_matches

        known = {each.lower(): each for each in __dir__()}
        close = get_close_matches(name.lower(), known, n=1)
        return f". Did you mean {known[close[0]]!r}?" if close else ". dir(nxdpp) lists its names."
