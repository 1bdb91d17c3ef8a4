"""Memory: loading needs that of the rank's tensors, saving only that of converted tensors."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.checkpoint.huggingface import write_directory
from tests.checkpoint.huggingface.checkpointed_models import tensors_in
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import make_model

# For pieces of the files, and for the imports of saving.
ALLOWED_BYTES = 60 * 2**20


def on_meta() -> LlamaForCausalLM:
    """A Llama of 93 million parameters, 372 MB in float32."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=8, vocab_size=8192
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def write(_: int, folder: Path) -> None:
    model = on_meta().to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.5)
    model.save_pretrained(folder, max_shard_size="200MB")


def load_and_save(_: int, folder: Path) -> tuple[int, int, int]:
    """Bytes that the first stage of two holds, and peak bytes of loading it and of saving the whole model."""
    parallel_state.initialize_debug(pipeline_model_parallel_rank=0, pipeline_model_parallel_size=2)
    # The imports of tracing depend on the build of torch.
    NxDPPModel(make_model("llama"))
    reset_peak()
    before = resident_bytes()
    wrapped = NxDPPModel(on_meta(), num_microbatches=2)
    load_pretrained(wrapped, folder / "first")
    loaded = peak_bytes() - before
    held = sum(parameter.nbytes for parameter in wrapped.local_parameters())
    assert all(bool((parameter == 1.5).all()) for parameter in wrapped.local_parameters())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    whole = NxDPPModel(on_meta())
    load_pretrained(whole, folder / "first")
    reset_peak()
    before = resident_bytes()
    save_pretrained(whole, folder / "again")
    return held, loaded, peak_bytes() - before


def mixture() -> MixtralForCausalLM:
    """A Mixtral of 79 million parameters, 315 MB in float32; the gates of a layer's experts have 26 MB."""
    config = MixtralConfig(
        hidden_size=512,
        intermediate_size=1600,
        num_hidden_layers=8,
        num_local_experts=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
    )
    return MixtralForCausalLM(config)


def save_mixture(_: int, folder: Path) -> tuple[int, int]:
    """Peak bytes of saving in files of 40 MB, and bytes of the files."""
    parallel_state.initialize_model_parallel()
    write_directory.SHARD_BYTES = 40_000_000
    wrapped = NxDPPModel(mixture())
    reset_peak()
    before = resident_bytes()
    save_pretrained(wrapped, folder)
    return peak_bytes() - before, sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_loading_needs_the_memory_of_the_rank_only_and_saving_no_copy(tmp_path: Path) -> None:
    run_ranks(1, write, tmp_path / "first")
    whole = sum(file.stat().st_size for file in (tmp_path / "first").glob("*.safetensors"))
    ((held, loaded, saved),) = run_ranks(1, load_and_save, tmp_path)
    assert held < loaded < held + ALLOWED_BYTES < held + whole / 2
    assert saved < ALLOWED_BYTES < whole / 4
    assert all(bool((tensor == 1.5).all()) for tensor in tensors_in(tmp_path / "again").values())


def test_saving_copies_the_converted_tensors_of_one_file_at_a_time(tmp_path: Path) -> None:
    ((taken, written),) = run_ranks(1, save_mixture, tmp_path)

    assert taken < 40_000_000 + ALLOWED_BYTES / 2 < written / 4
