"""Hugging Face directory, as source and as destination of a conversion."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from nxdpp.checkpoint.commands.source import Source, check_free, meta_model, plain_model
from nxdpp.checkpoint.files.checksummed_writer import write_streamed
from nxdpp.checkpoint.files.pieces import layout_of, layouts_of
from nxdpp.checkpoint.files.safetensors_reader import StoredTensor
from nxdpp.checkpoint.huggingface.conversion import Conversion
from nxdpp.checkpoint.huggingface.file_tensors import fitting_tensors
from nxdpp.checkpoint.huggingface.load_target import Target
from nxdpp.checkpoint.huggingface.mismatch import Accepted
from nxdpp.checkpoint.huggingface.model_tensors import tensors_of
from nxdpp.checkpoint.huggingface.quantised import can_dequantise, check_no_parts, quantiser_of
from nxdpp.checkpoint.huggingface.read_directory import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    adapter_weights,
    settings_of,
    stored_tensors,
    texts_in,
)
from nxdpp.checkpoint.huggingface.write_directory import SHARD_BYTES, SavedDirectory, Shard, plan_shards, start_save

_REMEDY = "Give the configuration of the files' model: --config DIR."


def huggingface_source(path: Path, config: Path | None, plain: bool = False) -> Source:
    """Return the model of the Hugging Face directory ``path``, with the conversions of ``from_pretrained``.

    Values keep their dtypes. ``plain`` tensors keep their names too. Raises ``ValueError`` where the tensors do not
    fit the configuration, for quantised tensors, and for an adapter.
    """
    if adapter_weights(path) is not None:
        raise ValueError(
            f"{path} holds an adapter, and a conversion is for the weights of a whole model: load it with "
            f"nxdpp.load_pretrained into a PeftModel, and save that with nxdpp.save_checkpoint."
        )
    if can_dequantise(path):
        raise ValueError(
            f"{path} has quantized weights, and a conversion keeps all values. Load them with "
            f"nxdpp.load_pretrained(model, {str(path)!r}, dequantize=True), and save that model."
        )
    quantiser_of(path, settings_of(path), False, nn.Module())
    stored = stored_tensors(path)
    check_no_parts(stored, path)
    if plain:
        layouts = layouts_of(stored)
        model = plain_model(layouts, {}, path)
        ordered = {name: layouts[name] for name in model.tensors.tensors}
        return Source(model, ordered, lambda name: stored[name].read())
    model = meta_model(texts_in(path), config, path)
    expected = tensors_of(model.module)
    target = Target(model.module, expected, expected, model.tied_names, remedy=_REMEDY)
    files, found = fitting_tensors(target, stored, Accepted(widths=True), path, type(model.module))
    provided: dict[str, str] = {}
    for names in (*([name] for name in model.tensors.tensors), *model.tied_names):
        given = [name for name in names if name in found.provided]
        files.check_copies_are_equal(given)
        provided[names[0]] = given[0]
    made = _Converted(stored, model.module)
    layouts = {}
    for name, source in provided.items():
        tensor = found.provided[source].convert(lambda each: stored[each].on_meta(), model.module)[source]
        layouts[name] = layout_of(tensor)
    return Source(model, layouts, lambda name: made.tensor(found.provided[provided[name]], provided[name]))


def write_huggingface(source: Source, destination: Path, largest: int = SHARD_BYTES) -> None:
    """Write the tensors and configuration that ``save_pretrained`` of the plain model would write.

    Files have at most ``largest`` bytes of values, or the tensors of one conversion.

    Raises ``ValueError`` where ``destination`` has a model, and ``OSError`` if it cannot be written.
    """
    check_free(destination, SINGLE_FILE, INDEX_FILE, CONFIG_FILE, ADAPTER_CONFIG)
    model = source.model
    first = {name: model.tensors.ties.get(name, name) for name in tensors_of(model.module)}
    held = {name: source.layouts[own] for name, own in first.items()}
    shards = plan_shards(model.module, model.tied_names, [held], largest)
    saved = SavedDirectory(destination, shards)
    try:
        start_save(destination, is_adapter=False)
        for file, shard in saved.files():
            write_streamed(file, shard.layouts, _values(source, first, shard))
        saved.finish(model.module, model.texts)
    except Exception:
        saved.remove_unfinished(0)
        raise


def _values(source: Source, first: dict[str, str], shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``shard`` in order; the sources of one conversion are in memory."""
    while shard.conversions:
        conversion = shard.conversions.pop(0)
        yield from conversion.convert(lambda name: source.read(first[name]), source.model.module).items()


class _Converted:
    """Tensors of the model, of which one conversion may make several: the results of the last one are kept."""

    def __init__(self, stored: Mapping[str, StoredTensor], module: nn.Module) -> None:
        self._stored = stored
        self._module = module
        self._last: Conversion | None = None
        self._made: dict[str, torch.Tensor] = {}

    def tensor(self, conversion: Conversion, name: str) -> torch.Tensor:
        """Return the result ``name`` of ``conversion``, in the dtype of the files. Only the caller keeps it then."""
        if self._last is not conversion or name not in self._made:
            self._made = {}
            self._made = conversion.convert(self._read, self._module)
            self._last = conversion
        return self._made.pop(name)

    def _read(self, name: str) -> torch.Tensor:
        return self._stored[name].read()
