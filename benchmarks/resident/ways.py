"""The ways in which a rank comes to its part of a model with values."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp import NxDPPModel

MICROBATCHES = 8


@dataclass(frozen=True)
class Way:
    """How it is done: ``make`` takes a configuration and the folder of its weights.

    ``has_target`` says whether a rank's own part bounds what it may take, ``in_turn`` whether ranks do it one after
    another, ``reads_weights`` whether there has to be a folder.
    """

    title: str
    make: Callable[[LlamaConfig, str], NxDPPModel]
    has_target: bool = True
    in_turn: bool = False
    reads_weights: bool = False


def _meta(config: LlamaConfig, _: str) -> NxDPPModel:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    wrapped = _wrap(model)
    wrapped.materialise()
    return wrapped


def _init_on_device(config: LlamaConfig, _: str) -> NxDPPModel:
    with nxdpp.init_on_device(torch.device("meta")):
        model = LlamaForCausalLM(config)
    wrapped = _wrap(model)
    wrapped.materialise()
    return wrapped


def _deferred_init(config: LlamaConfig, _: str) -> NxDPPModel:
    return _wrap(nxdpp.deferred_init(LlamaForCausalLM, config))


def _load_pretrained(config: LlamaConfig, weights: str) -> NxDPPModel:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    wrapped = _wrap(model)
    nxdpp.load_pretrained(wrapped, weights)
    return wrapped


def _save_pretrained(config: LlamaConfig, weights: str) -> NxDPPModel:
    wrapped = _load_pretrained(config, weights)
    nxdpp.save_pretrained(wrapped, f"{weights}/saved")
    return wrapped


def _eager(config: LlamaConfig, _: str) -> NxDPPModel:
    return _wrap(LlamaForCausalLM(config))


def _wrap(model: LlamaForCausalLM) -> NxDPPModel:
    return NxDPPModel(model, num_microbatches=MICROBATCHES)


WAYS = {
    "meta": Way('torch.device("meta"), wrap, materialise', _meta),
    "init_on_device": Way("init_on_device, wrap, materialise", _init_on_device),
    "deferred_init": Way("deferred_init, wrap", _deferred_init),
    "load_pretrained": Way('torch.device("meta"), wrap, load_pretrained', _load_pretrained, reads_weights=True),
    "save_pretrained": Way("the same, and save_pretrained", _save_pretrained, reads_weights=True),
    "eager": Way("eager constructor, wrap; a rank at a time", _eager, has_target=False, in_turn=True),
}
