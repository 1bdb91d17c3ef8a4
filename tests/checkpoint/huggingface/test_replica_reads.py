"""Replicas read each byte of a checkpoint once, and hosts each header; an error of one rank is that of all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxdpp import NxDPPModel, init_on_device, load_pretrained, parallel_state, tensor_parallelize
from nxdpp.checkpoint.files.safetensors_reader import OpenFile, StoredTensor, read_header
from nxdpp.checkpoint.huggingface import file_tensors
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, saved_by_transformers, tensors_in
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import llama as divisible_llama


class Counts:
    """Bytes of values and numbers of headers that this rank reads."""

    def __init__(self) -> None:
        self.bytes = 0
        self.headers = 0
        self.from_system = 0

    def of_all(self) -> dict[str, list[int]]:
        """The counts of all ranks."""
        every = parallel_state.get_exchange().gather(vars(self))
        return {name: [each[name] for each in every] for name in vars(self)}


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    read, header = OpenFile.read, read_header

    def filling(self: OpenFile, stored: StoredTensor, start: int, into: memoryview) -> None:
        counts.bytes += len(into)
        read(self, stored, start, into)

    def reading(path: Path, opened: OpenFile) -> dict[str, StoredTensor]:
        counts.headers += 1
        return header(path, opened)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenFile, "read", filling)
        patch.setattr("nxdpp.checkpoint.huggingface.read_directory.read_header", reading)
        before = _from_system()
        yield counts
        counts.from_system = _from_system() - before


def _from_system() -> int:
    """Bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def wrapped(model: Any, stages: int, **arguments: Any) -> NxDPPModel:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    return NxDPPModel(model, num_microbatches=stages, **arguments)


def loads_once(folder: Path, name: str, stages: int) -> None:
    """The bytes of the files are read once by all ranks together, and each header once."""
    expected = tensors_in(folder / name)
    size, files = sum(each.nbytes for each in expected.values()), len(list((folder / name).glob("*.safetensors")))
    whole = type(make(name)).from_pretrained(folder / name).state_dict()
    # Parameters in memory are read twice, and a tied weight of two stages is read by both.
    for model, times in ((on_meta(name), 1), (make(name, seed=5), 2)):
        loaded = wrapped(model, stages)
        with counted() as counts:
            load_pretrained(loaded, folder / name)
        read = counts.of_all()
        tied = whole["model.embed_tokens.weight"].nbytes if name == "tied_llama" and stages > 1 else 0
        assert sum(read["bytes"]) == times * (size + tied)
        assert sum(read["headers"]) == files
        # Beside values: the configuration and the files of the system.
        assert sum(read["from_system"]) < times * (size + tied) + 4 * 60_000
        # Each replica has its share.
        assert max(read["bytes"]) < 0.7 * times * (size + tied) / stages
        assert differing(loaded.local_state_dict(), whole) == []


def replicas_that_differ_read_all_of_their_own(folder: Path) -> None:
    whole = make("llama").state_dict()
    dtype = torch.bfloat16 if dist.get_rank() == 1 else torch.float32
    loaded = wrapped(on_meta("llama").to(dtype), 2)
    with counted() as counts:
        load_pretrained(loaded, folder / "llama", convert_dtype=True)
    read = counts.of_all()["bytes"]
    size = parallel_state.get_exchange().gather(4 * sum(each.numel() for each in loaded.local_parameters()))
    assert read[:2] == size[:2]
    assert read[2] + read[3] == size[2]
    assert {each.dtype for each in loaded.local_parameters()} == {dtype}
    assert differing(loaded.local_state_dict(), {name: each.to(dtype) for name, each in whole.items()}) == []


def errors_of_one_rank_are_raised_on_all(folder: Path) -> None:
    rank, own = dist.get_rank(), OSError("no more")

    def fail(*_: object) -> Any:
        raise own

    broken: list[tuple[Any, str]] = [(OpenFile, "read"), (file_tensors.FileTensors, "_local_conversions")]
    for place, name in broken:
        model = wrapped(on_meta("llama"), 2)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(place, name, fail)
            with pytest.raises(OSError if rank == 1 else RuntimeError, match="no more") as caught:
                load_pretrained(model, folder / "llama")
        assert rank == 1 or "was not loaded: on rank 1, OSError: no more" in str(caught.value)
        assert all(parameter.is_meta for parameter in model.local_parameters())
        load_pretrained(model, folder / "llama")
        assert differing(model.local_state_dict(), make("llama").state_dict()) == []


def errors_of_the_host_are_raised_on_all(folder: Path) -> None:
    for name, text in (("damaged", "is truncated or corrupt"), ("nothing", "is not a directory")):
        model = wrapped(on_meta("llama"), 2)
        with pytest.raises(ValueError, match=text):
            load_pretrained(model, folder / name)
        assert all(parameter.is_meta for parameter in model.local_parameters())


def tensor_ranks_read_their_parts(folder: Path) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with init_on_device(torch.device("meta")):
        model = tensor_parallelize(divisible_llama())
    loaded = NxDPPModel(model)
    with counted() as counts:
        load_pretrained(loaded, folder / "divisible")
    expected = tensors_in(folder / "divisible")
    norms = sum(each.nbytes for name, each in expected.items() if "norm" in name)
    size = sum(each.nbytes for each in expected.values())
    # Parts of rows of 32 elements are read with the rows: those of attention's output and of the experts' last matrix.
    rows = sum(each.nbytes for name, each in expected.items() if "o_proj" in name or "down_proj" in name)
    assert sum(counts.of_all()["bytes"]) == size + norms + rows
    gathered = parallel_state.get_exchange().gather(
        {name: tensor.detach() for name, tensor in loaded.local_state_dict().items()}
    )
    for name, tensor in expected.items():
        for replica in (gathered[:2], gathered[2:]):
            parts = [each[name] for each in replica]
            dims = [dim for dim in range(tensor.ndim) if parts[0].shape[dim] != tensor.shape[dim]]
            assert torch.equal(torch.cat(parts, dims[0]) if dims else parts[0], tensor), name
            assert torch.equal(parts[0], replica[0][name])


def _cases(rank: int, folder: Path) -> None:
    loads_once(folder, "tied_llama", 2)
    parallel_state.destroy_model_parallel()
    loads_once(folder, "mixtral", 1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    cases: list[Callable[[Path], None]] = [
        replicas_that_differ_read_all_of_their_own,
        errors_of_one_rank_are_raised_on_all,
        errors_of_the_host_are_raised_on_all,
        tensor_ranks_read_their_parts,
    ]
    for case in cases:
        case(folder)


def test_four_ranks(tmp_path: Path) -> None:
    for name in ("llama", "tied_llama", "mixtral"):
        saved_by_transformers(name, tmp_path / name, max_shard_size="100KB")
    damaged = tmp_path / "damaged" / "model.safetensors"
    saved_by_transformers("llama", damaged.parent)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    divisible_llama().save_pretrained(tmp_path / "divisible")
    run_ranks(4, _cases, tmp_path)
