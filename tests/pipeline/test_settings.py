"""Settings of a model, which are written once: the constructor and its help have their names."""

import dataclasses
import inspect
import pydoc
import re
from typing import Any

import pytest

from nxdpp import NxDPPModel
from nxdpp.pipeline.config import Settings
from tests.support.models import make

pytestmark = pytest.mark.usefixtures("one_rank")

FIELDS = {each.name: each for each in dataclasses.fields(Settings)}


def test_the_constructor_has_the_settings_in_order_with_their_defaults() -> None:
    own = inspect.signature(NxDPPModel).parameters
    assert list(own) == list(FIELDS)
    for name, each in own.items():
        default = FIELDS[name].default
        assert each.default == (inspect.Parameter.empty if default is dataclasses.MISSING else default)
        assert each.annotation is not inspect.Parameter.empty


def test_help_tells_of_each_setting_with_its_type() -> None:
    text = pydoc.plain(pydoc.render_doc(NxDPPModel))
    assert "num_microbatches: int = 1" in text
    assert "return_mb_loss: bool = False" in text
    arguments = (inspect.getdoc(NxDPPModel) or "").partition("Args:")[2]
    told = re.findall(r"^    (\w[\w, ]*): ", arguments, re.M)
    assert {name for names in told for name in names.split(", ")} == set(FIELDS)


def test_what_runs_the_model_is_not_replaced() -> None:
    wrapped: Any = NxDPPModel(make("llama", layers=2), num_microbatches=2)
    for name in ("part", "steps"):
        with pytest.raises(AttributeError, match=rf"{name} is the pipeline's own: .* Set model\.original_module\."):
            setattr(wrapped, name, 7)
