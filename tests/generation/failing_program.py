"""A generation in which a layer of rank 0 fails, or a criterion of the driver; run by test_failures."""

import sys

from nxdpp import NxDPPModel, parallel_state
from tests.generation.generated_models import MODELS, prompt
from tests.pipeline.whole.breaking import Breaking, say_that_it_fails

_FAILING_CALL = 3


def _refuse(*args: object, **others: object) -> None:
    say_that_it_fails()
    raise KeyError("the criterion broke")


def main(where: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = NxDPPModel(MODELS["llama"]()).eval()
    if where == "layer" and model.rank == 0:
        dict(model.local_named_modules())["model.layers.1"].register_forward_hook(Breaking(_FAILING_CALL, False))
    criteria = [_refuse] if where == "criterion" else None
    model.generate(prompt(2), max_new_tokens=8, stopping_criteria=criteria)


main(sys.argv[1])
