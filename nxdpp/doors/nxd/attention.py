"""Attention functions of NeuronX Distributed's scripts, whose kernels are torch's own here.

::

    query (B, heads, S, D)      with transpose_nki_inputs (B, heads, D, S), as key and value ──▶ (B, heads, S, D)
"""

import torch
from torch.nn import functional

__all__ = ["apply_rotary_pos_emb", "nki_flash_attn_func", "nki_ring_attn_func"]


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    flash_attn: bool,
    transpose_nki_inputs: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, each turned by the angles of its position.

    Args:
        q, k: of shape ``(B, heads, S, D)``, and ``(B, heads, D, S)`` with both of the last arguments.
        cos, sin: tables ``(B, S, D)``; with ``position_ids`` tables ``(positions, D)``.
        position_ids: of shape ``(B, S)``.
        flash_attn, transpose_nki_inputs: the layout of ``q`` and ``k``.
    """
    tables = [table if position_ids is None else table[position_ids] for table in (cos, sin)]
    dim = -2 if flash_attn and transpose_nki_inputs else -1
    cos, sin = (table.unsqueeze(1).transpose(-1, dim) for table in tables)
    return _turned(q, cos, sin, dim), _turned(k, cos, sin, dim)


def nki_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lnc: int = 1,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: torch.Tensor | None = None,
    hardware_type: object = None,
    transpose_nki_inputs: bool = True,
) -> torch.Tensor:
    """Return torch's ``scaled_dot_product_attention`` of ``q``, ``k`` and ``v``, for any length of a sequence.

    Args:
        q, k, v: of shape ``(B, heads, D, S)``, and ``(B, heads, S, D)`` without ``transpose_nki_inputs``.
        lnc, hardware_type, mixed_precision: of Neuron's kernel, without effect: torch chooses the kernel.
        dropout_p: chance that a weight is dropped, by torch's generator.
        softmax_scale: factor of the products, by default ``D ** -0.5``.
        causal: a token attends to itself and those before it.
        seed: ``None``.
        transpose_nki_inputs: the layout of the inputs.

    Returns:
        A tensor of shape ``(B, heads, S, D)``.

    Raises:
        ValueError: for a ``seed``.
    """
    if seed is not None:
        raise ValueError("seed= of the attention is not supported: call torch.manual_seed before the step.")
    if transpose_nki_inputs:
        q, k, v = (each.transpose(-2, -1) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, scale=softmax_scale)


def nki_ring_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank_id: int,
    src_tgt_pairs: object,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``nki_flash_attn_func`` of ``(B, heads, S, D)``: a ring of context-parallel ranks has one rank here."""
    return nki_flash_attn_func(q, k, v, 1, dropout_p, softmax_scale, causal, mixed_precision, seed, None, False)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> torch.Tensor:
    first, second = x.chunk(2, dim)
    return x * cos + torch.cat((-second, first), dim) * sin
