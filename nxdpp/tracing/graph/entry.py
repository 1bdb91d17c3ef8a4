"""The module that a tracer traces: it calls the user's module by keyword."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import fx, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from nxdpp.ground.torch_names import pytree
from nxdpp.tracing.graph.calls import recorded_autograd_functions
from nxdpp.tracing.graph.constructors import (
    refused_random_numbers,
    refused_random_tensors,
    refused_seeds,
    under_all_names,
)
from nxdpp.tracing.graph.modes import recorded_modes, refused_kernel_order
from nxdpp.tracing.graph.spine import SpineTracer
from nxdpp.tracing.graph.told_once import told_checkpoints
from nxdpp.tracing.models.transformers_models import returns_tuples
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.parameter_devices import refused_functional_calls
from nxdpp.tracing.sizes.input_specs import InputSpec
from nxdpp.tracing.values.input_dicts import close_inputs
from nxdpp.tracing.values.lost_changes import ROOT, unchanged_modules
from nxdpp.tracing.values.nested import flatten
from nxdpp.tracing.values.proxy import refuse_attributes_of_output


class Entry(nn.Module):
    """A call of a module, with a placeholder for each input, that returns the leaves of its output.

    ``inputs`` has the specs of these inputs, ``constants`` the other inputs. ``namespaces`` are globals of the user's
    functions. ``output_spec`` is the structure of the output, after a call.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Mapping[str, InputSpec],
        constants: Mapping[str, Any],
        tracer: fx.Tracer,
        namespaces: list[dict[str, Any]],
    ) -> None:
        super().__init__()
        self.add_module(ROOT, module)
        self._inputs = inputs
        self._constants = constants
        self._tracer = tracer
        self._namespaces = namespaces
        self.output_spec: pytree.TreeSpec | None = None

    def forward(self) -> list[Any]:
        """Return the leaves of the module's output; runs in a trace."""
        module = self.get_submodule(ROOT)
        proxies = {name: self._placeholder(name, spec) for name, spec in self._inputs.items()}
        with ExitStack() as stack:
            stack.enter_context(recorded_modes(self._tracer.graph))
            stack.enter_context(refused_kernel_order(self._namespaces))
            stack.enter_context(recorded_autograd_functions())
            stack.enter_context(told_checkpoints(self._namespaces))
            stack.enter_context(refused_functional_calls())
            stack.enter_context(refused_random_numbers(module))
            if isinstance(self._tracer, SpineTracer):
                tensors = (proxies[name] for name, spec in self._inputs.items() if spec.dtype is not None)
                first_input = next(tensors, None)
                stack.enter_context(self._tracer.surroundings(module, first_input))
            else:
                stack.enter_context(refused_random_tensors())
                stack.enter_context(unchanged_modules(list(listings.modules(module))))
            stack.enter_context(refused_seeds(self._namespaces))
            stack.enter_context(under_all_names(self._namespaces))
            output = module(**close_inputs({**proxies, **self._constants}))
        if isinstance(output, ModelOutput) and isinstance(module, PreTrainedModel) and returns_tuples(module):
            output = output.to_tuple()
        values, self.output_spec = flatten(output)
        refuse_attributes_of_output(module, values)
        return values

    def named_modules(
        self, *args: Any, remove_duplicate: bool = True, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules, also of classes that override this method; fx calls it."""
        yield from listings.named_modules(self, remove_duplicate)

    def _placeholder(self, name: str, spec: InputSpec) -> fx.Proxy:
        proxy = self._tracer.create_proxy("placeholder", name, (), {})
        proxy.node.meta["spec"] = spec
        return proxy
