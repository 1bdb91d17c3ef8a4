"""Checks of this rank's part before the next step: hooks, wrappers of data parallelism, dtypes, and values."""

from collections.abc import Collection

from torch import nn

from nxdpp.pipeline import arguments
from nxdpp.pipeline.agreement.same_values import RankValues
from nxdpp.pipeline.local.other_wrappers import refuse_local_wrappers
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.spine_hooks import SpineHooks


class NextStep:
    """Checks and verification of this rank's ``part`` of ``module`` in the next step; its layers are ``layers``.

    Hooks are compared in each step. The first step after a change looks for wrappers, and checks dtypes and values.
    """

    def __init__(self, module: nn.Module, part: LocalPart, layers: Collection[str]) -> None:
        self._part = part
        self._hooks = SpineHooks(module, part.module, layers)
        self._has_no_wrappers = False
        self._dtypes_are_checked = False
        self._values_are_verified = False
        self._has_run = False
        self._followed_replacements = 0

    def has_replacements(self) -> bool:
        """Return whether modules of the tree were replaced by their full names since the last ``follow``.

        Raises ``RuntimeError`` for such a replacement after the first step.
        """
        if self._part.module.replacements == self._followed_replacements:
            return False
        if self._has_run:
            raise RuntimeError(
                "modules of local_module were replaced after the first step: call refresh() on every rank, also on "
                "those that replaced none."
            )
        return True

    def check_modules(self) -> None:
        """Raise ``RuntimeError`` for hooks that would not run, and once for modules in wrappers."""
        self._hooks.check()
        if not self._has_no_wrappers:
            refuse_local_wrappers(self._part.module)
            self._has_no_wrappers = True

    def check_dtypes(self) -> None:
        """Raise ``RuntimeError`` for parameters of a dtype that cannot be trained; once."""
        if not self._dtypes_are_checked:
            arguments.check_trained_dtypes(self._part.module)
            self._dtypes_are_checked = True

    def note_hooks(self) -> bool:
        """Take the present hooks as those of the graphs; return whether they changed."""
        return self._hooks.note()

    def unverified_values(self) -> RankValues | None:
        """Return the values that the ranks have to compare; ``None`` where they have compared them."""
        return None if self._values_are_verified else self._part.values()

    def note_verified(self) -> None:
        """Note that a step runs, in which the ranks have compared the values."""
        self._has_run = True
        if not self._values_are_verified:
            self._values_are_verified = True
            self._part.forget_initial_weights()

    def follow(self) -> bool:
        """Follow tensors and modules that were moved, loaded or replaced; return whether hooks changed.

        Raises ``RuntimeError`` for modules in wrappers. The next step looks for them too: a program may wrap a layer
        between a move and the step.
        """
        refuse_local_wrappers(self._part.module)
        self._followed_replacements = self._part.module.replacements
        self._has_no_wrappers = False
        self._dtypes_are_checked = False
        self._values_are_verified = False
        return self.note_hooks()
