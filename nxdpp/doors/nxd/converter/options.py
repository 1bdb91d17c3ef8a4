"""Options of the converter, with the names and defaults of NeuronX Distributed's."""

import argparse

from nxdpp.doors.nxd.converter.head_order import BACKENDS

MODES = ("convert_from_full_state", "convert_to_full_state", "convert_from_xser", "convert_to_xser")

_REFUSED = {
    "hf_model_name": "download the model with huggingface_hub.snapshot_download, and give its directory as --input_dir",
    "nxdt_yaml_config": "give the config.json of the model as --config",
    "i_tp_round_factor": "it pads experts for kernels of Neuron devices; leave it out",
    "save_xser": "xser files are of torch_xla's classes; NxD loads the files that are written without it",
    "convert_to_xser": "xser files are of torch_xla's classes; NxD loads the files as they are",
}


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "1", "false", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} must be True or False")
    return text.lower() in ("true", "1")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. Options that ``check`` refuses are there, so that they have a sentence."""
    parser = argparse.ArgumentParser(description="Convert between whole tensors and the files of NxD's ranks.")
    add = parser.add_argument
    add("--input_dir", help="a Hugging Face directory, a file of whole tensors, or the directory of the ranks' files")
    add("--output_dir", required=True, help="directory of what is written")
    add("--hw_backend", required=True, choices=BACKENDS, help="order of attention heads with --qkv_linear")
    add("--config", help="config.json of the model")
    add("--model_key", default="model", help="entry of the model's state in a file of a rank")
    add("--tp_size", type=int, default=1, help="tensor-parallel ranks")
    add("--pp_size", type=int, default=1, help="pipeline ranks")
    add("--ep_size", type=int, default=1, help="expert-parallel ranks")
    add("--virtual_pp_size", type=int, default=1, help="stages of a pipeline rank")
    add("--n_layers", type=int, default=0, help="without effect: the tensors tell the layers")
    add("--kv_size_multiplier", type=int, default=1, help="copies of each key-value head")
    for name, text in (
        ("coalesce_qkv", "query, key and value as one weight, without --qkv_linear"),
        ("qkv_linear", "query, key and value are of GQAQKVColumnParallelLinear"),
        ("fuse_qkv", "with --qkv_linear, as one weight_qkv"),
        ("pad_attn_heads", "with --qkv_linear, add query heads of zeros"),
        ("load_xser", "without effect: a file tells its format"),
        ("save_xser", "refused"),
    ):
        add(f"--{name}", type=_truth, default=False, help=text)
    for mode in MODES:
        add(f"--{mode}", action="store_true")
    add("--hf_model_name", help="refused")
    add("--i_tp_round_factor", type=int, default=0, help="refused")
    add("--model_style", choices=["hf", "megatron"], default="hf", help="only hf")
    add("--nxdt_yaml_config", help="refused")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that cannot be honoured, before anything is read."""
    if sum(bool(getattr(args, mode)) for mode in MODES) != 1:
        raise ValueError(f"give exactly one of {', '.join(f'--{mode}' for mode in MODES)}.")
    for name, remedy in _REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"--{name} {getattr(args, name)} is refused: {remedy}.")
    if args.model_style != "hf":
        raise ValueError("--model_style megatron has the names of NeMo's models; convert those with NxD.")
    if not args.input_dir:
        raise ValueError("--input_dir is missing: the directory or file that is converted.")
    if not args.config and not args.convert_from_xser:
        raise ValueError("--config is missing: the config.json of the model, for its numbers of heads.")
    if (args.fuse_qkv or args.pad_attn_heads or args.kv_size_multiplier > 1) and not args.qkv_linear:
        raise ValueError("--fuse_qkv, --pad_attn_heads and --kv_size_multiplier need --qkv_linear True.")
    if args.coalesce_qkv and args.qkv_linear:
        raise ValueError("--coalesce_qkv and --qkv_linear exclude each other: give one of them.")
