"""The names of the modules above the layers, and refusals of such modules."""

import pytest

from nxdpp.tracing.modules.spine_modules import spine_names
from tests.support.traced_models import make_model


def test_the_ancestors_of_the_layers() -> None:
    model = make_model("bert", layers=2)

    assert spine_names(model, ["bert.encoder.layer.0", "bert.encoder.layer.1"], ()) == {
        "",
        "bert",
        "bert.encoder",
        "bert.encoder.layer",
    }


def test_a_leaf_above_layers_is_refused() -> None:
    model = make_model("bert", layers=2)

    with pytest.raises(ValueError, match=r"BertEncoder, but bert\.encoder of that class holds"):
        spine_names(model, ["bert.encoder.layer.0"], (type(model.get_submodule("bert.encoder")),))
