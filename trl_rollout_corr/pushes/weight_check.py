"""
Check that pushed weights arrive in the sampler, by reading them there.

A push that does not arrive raises no error and leaves `staleness_max` at 0, while the sampler keeps all or some of its
first weights.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..messages import notify
from .fingerprints import READABLE, fingerprint, in_one_form, some_columns


NEAR = 10  # pushes within which a second failure ends the run, and after which unmoved quantised weights are reported
SEE_ARRIVAL = "See `trl-rollout-corr docs pushes#weights-do-not-arrive`."
STILL = 5  # consecutive pushes of equal weights before a warning


class Push(NamedTuple):
    """Fingerprints after one push of weights."""

    sent: dict[str, int]  # by weight that was sent, in the type of the sampler
    as_sent: dict[str, int]  # the same in its own type
    held: dict[str, list]  # by tensor of the sampler
    values: dict[str, int]  # by weight that was sent, as the sampler holds it, where that is known
    varied: set[str]  # weights that were sent and are no constant
    trained: int  # of all trained parameters


class WeightCheck:
    """
    Comparison after each push of what was sent to the sampler with what it holds.

    If a weight is sent with another value than at the push before, rounded to the sampler's type, then the tensor that
    holds it in the sampler must change as well. If not a single bit of the tensor changed, the weight did not arrive,
    because neither options of sampling nor precision can explain that. After two such pushes within ten,
    [`WeightCheck.judge`] raises an error.

    Where the sampler has held exactly what was sent, and that was no constant, a part of a fused tensor or an expert
    among them, it must hold it after later pushes as well. Otherwise the weight counts as one that did not arrive. A
    message names weights that it has never held like that.

    In a tensor that the sampler quantises, an update below a step of its grid changes no bit. So such a tensor never
    counts as a failed push; [`WeightCheck.unmoved`] gives the share of quantised tensors that did not change.

    `read` returns what the sampler holds, and where it puts given weights
    ([`~trl_rollout_corr.pushes.fingerprints.read_weights`]); `None` if the sampler cannot be read. `model` is
    the trainer's, not wrapped. `dtype` returns the type of the sampler's weights, which may be known only after a
    while.
    """

    def __init__(self, read: Callable[[list[str]], dict | None], model: Any, dtype: Callable[[], str]) -> None:
        self.read, self.model = read, model
        self.dtype = dtype
        self.done = False
        self._sent: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._before: Push | None = None
        self._pushes = 0
        self._exact: set[str] = set()  # weights that the sampler keeps as they are sent
        self._failed: int | None = None  # number of the last push that did not arrive
        self._still = self._all_unmoved = 0
        self._warned_unread = self._warned_unreadable = self._warned_unseen = False
        # Of the latest push: weights in a type without fingerprints, and what the sampler told
        self._packed: list[str] = []
        self._type = torch.bfloat16  # of the weights of the sampler
        self._places: dict[str, list[str]] = {}  # tensors of the sampler that hold each weight
        self._quantised: set[str] = set()  # tensors that the sampler quantises
        # Share of the quantised tensors that did not change at the last push; `None` if unknown
        self.unmoved: float | None = None

    def noting(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Take fingerprints of the weights of a push, on their way to the sampler."""
        if self.done:
            yield from weights
            return
        self._sent, self._packed, self._type = {}, [], getattr(torch, self.dtype(), torch.bfloat16)
        for name, weight in weights:
            self._note(name, weight)
            yield name, weight

    def _note(self, name: str, weight: torch.Tensor) -> None:
        if weight.dtype not in READABLE:
            self._packed.append(name)
        if weight.dtype not in READABLE or not weight.numel():
            return
        columns = some_columns(weight.detach())
        # in the type of the sampler, because rounding may remove a change there
        own = fingerprint(columns)
        rounded = own if columns.dtype == self._type else fingerprint(in_one_form(columns.to(self._type)))
        self._sent[name] = rounded, own, _varies(columns)

    def judge(self, step: int, *, announced: bool = False, doubt: str = "") -> None:
        """
        Raise an error if weights did not arrive for the second time, after optimizer step `step`.

        `announced` is true if the run announced that the sampler gets older weights than the trainer's. `doubt` is a
        reason why the weights of the sampler may not matter. The error is then a warning.
        """
        before, now = self._before, self._push()
        self.unmoved = None
        if now is None:
            return
        self._before = now
        self._pushes += 1
        self._exact |= {name for name in now.values if _is_kept(name, before, now)}
        if before is None or announced:
            self._failed, self._still = None, 0
            return
        self._tell_unseen(now)
        self._judge_trainer(before, now, step)
        self._judge_quantised(before, now, step)
        missing = self._missing(before, now)
        wrong = [name for name in now.values if name in self._exact and not _is_equal(now, name)]
        if not missing and not wrong:
            return
        again = self._failed is not None and self._pushes - self._failed <= NEAR
        self._failed = self._pushes
        if again:
            self._tell(missing or wrong, step, doubt, stayed=bool(missing))

    def _push(self) -> Push | None:
        """Fingerprints of the last push; `None` if nothing was sent, or the sampler cannot be read."""
        if self.done or not self._sent:
            return None
        sent, as_sent, varied = (
            dict(zip(self._sent, torch.stack(column).tolist(), strict=True))
            for column in zip(*self._sent.values(), strict=True)
        )
        self._sent = {}
        weights = self._read(list(sent))
        self._places = {} if weights is None else weights["places"]
        self._quantised = set() if weights is None else {*weights.get("quantised", ())}
        held, values = ({}, {}) if weights is None else (weights["held"], weights.get("values", {}))
        return Push(sent, as_sent, held, values, {name for name, x in varied.items() if x}, self.trained())

    def _read(self, names: list[str]) -> dict | None:
        """Weights that the sampler holds; `None` if it cannot be read, with one warning."""
        try:
            weights = self.read(names)
        except Exception as error:  # no release of vLLM may end a run here
            if not self._warned_unread:
                self._warned_unread = True
                notify(
                    "From here on, pushed weights are not compared with those that vLLM holds, unless a later push "
                    f"can read them: reading failed with {type(error).__name__}: {error}. {SEE_ARRIVAL}"
                )
            return None
        unreadable = [*self._packed, *([] if weights is None else weights.get("unreadable", ()))]
        if unreadable and not self._warned_unreadable:
            self._warned_unreadable = True
            listed = ", ".join(f"`{name}`" for name in unreadable[:3]) + (", ..." if len(unreadable) > 3 else "")
            notify(
                f"{len(unreadable)} of the {len(names) + len(self._packed)} weights that are pushed are not compared "
                f"with those that vLLM holds, because they are stored in a form that cannot be read ({listed}). "
                f"{SEE_ARRIVAL}"
            )
        return weights

    def _tell_unseen(self, now: Push) -> None:
        """Say once of which weights no value is compared, because the sampler keeps no layout that can be read."""
        if self._warned_unseen or not now.held:
            return
        self._warned_unseen = True
        seen_whole = [
            name
            for name in now.varied - self._exact
            if (place := self._places.get(name)) and self._quantised.isdisjoint(place)
        ]
        if seen_whole:
            listed = ", ".join(f"`{name}`" for name in sorted(seen_whole)[:3]) + (
                ", ..." if len(seen_whole) > 3 else ""
            )
            notify(
                f"{len(seen_whole)} of the {len(now.sent)} weights that are pushed are compared with those that vLLM "
                f"holds at most as whole tensors ({listed}), because vLLM splits them over ranks, keeps them in a "
                "layout of its own, or had other values from the first push on. The comparison does not see a part "
                f"of them that does not arrive, such as one expert; `fresh_k3_kl` would grow. {SEE_ARRIVAL}"
            )

    def trained(self) -> int:
        """Fingerprint of the trained parameters, or of this rank's part of them."""
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters() if p.requires_grad]
        fingerprints = [fingerprint(some_columns(p.detach())) for p in parts if p.numel() and p.dtype in READABLE]
        return int(torch.stack(fingerprints).sum()) if fingerprints else 0

    def _missing(self, before: Push, now: Push) -> list[str]:
        """Weights that were sent with a new value while all tensors that hold them stayed the same."""
        changed = [name for name, x in now.sent.items() if before.sent.get(name, x) != x]
        missing = []
        for name in changed:
            place = self._places.get(name)
            if self._quantised and (place == [""] or not self._quantised.isdisjoint(place or [])):
                continue
            if place == [""]:  # other weights change the whole model, too
                if 2 * len(changed) > len(now.sent) and now.held and now.held == before.held:
                    missing.append(name)
            elif place and all(_stayed(before.held.get(x), now.held[x]) for x in place):
                missing.append(name)
        return missing

    def _judge_quantised(self, before: Push, now: Push, step: int) -> None:
        """
        Count the quantised tensors that did not change although some of their weights were sent with a new value.
        """
        changed = {
            place
            for name in now.sent
            if before.sent.get(name) != now.sent[name]
            for place in self._places.get(name, [])
        }
        tensors = changed & self._quantised
        if not tensors:
            return

        def still(tensor: str) -> bool:  # together with its scales
            return all(
                before.held.get(x) == now.held[x] for x in now.held if x == tensor or x.startswith(f"{tensor}_scale")
            )

        self.unmoved = sum(map(still, tensors)) / len(tensors)
        self._all_unmoved = self._all_unmoved + 1 if self.unmoved == 1 else 0
        if self._all_unmoved == NEAR:
            notify(
                "Updates may be smaller than a step of the grid to which the sampler rounds its weights, as with a "
                "very small learning rate. If that is not the case, weights do not arrive: no quantised tensor of the "
                f"sampler has changed at the last {NEAR} pushes until optimizer step {step}. {SEE_ARRIVAL}"
            )

    def _judge_trainer(self, before: Push, now: Push, step: int) -> None:
        """Warn if the trainer's parameters change but the sent weights do not."""
        if now.as_sent != before.as_sent:
            self._still = 0
        elif now.trained != before.trained:
            self._still += 1
        if self._still == STILL:
            notify(
                "Merging an adapter into weights of low precision may round its updates away, and a very small "
                "learning rate may have no effect. If neither is the case, the wrong weights are sent to the sampler: "
                f"the last {STILL + 1} pushes until optimizer step {step} sent the same values, although the "
                f"parameters of the trainer have changed. {SEE_ARRIVAL}"
            )

    def _tell(self, missing: list[str], step: int, doubt: str, *, stayed: bool) -> None:
        listed = ", ".join(f"`{name}`" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
        seen = (
            f"the tensors of vLLM did not change in a single bit for {len(missing)} of the weights that were sent "
            "with new values"
            if stayed
            else f"vLLM holds other values than were sent for {len(missing)} of the weights, which it held as they "
            "were sent after an earlier push"
        )
        message = (
            f"The sampler {'may' if doubt else 'does'} not have the weights of the trainer: two pushes, the last one "
            f"after optimizer step {step}, reported success, but {seen} ({listed}). Update vLLM, or change "
            "`vllm_mode`, the device or the type of weights; or, if the sampler should have older weights, set "
            "`trainer.rollout_step` to their optimizer step whenever they are pushed (`trl-rollout-corr docs "
            "pushes#weights-do-not-arrive`)."
        )
        self.done = True
        if not doubt:
            raise RuntimeError(message)
        notify(f"{doubt} {message}")


def _varies(x: torch.Tensor) -> torch.Tensor:
    """Whether, `()`, nearly all neighbours differ, so that no other layout or type has the same fingerprint."""
    flat = x.reshape(-1)
    return 10 * (flat[1:] != flat[:-1]).sum() > 9 * max(len(flat) - 1, 4)


def _is_kept(name: str, before: Push | None, now: Push) -> bool:
    """
    True if the sampler holds a weight as it was sent, and that is no coincidence. A constant, such as a bias of zeros,
    is the same in each layout and type, so it must have been equal with another value as well.
    """
    if not _is_equal(now, name):
        return False
    if name in now.varied:
        return True
    seen = before is not None and name in before.values and _is_equal(before, name)
    return before is not None and seen and before.as_sent[name] != now.as_sent[name]


def _is_equal(push: Push, name: str) -> bool:
    """True if the sampler holds a weight as it was sent, in its own type or in the sampler's."""
    return push.values[name] in (push.sent.get(name), push.as_sent.get(name))


def _stayed(before: list | None, now: list) -> bool:
    """True if a tensor is unchanged in one of the forms in which a layer keeps it."""
    return before is not None and any(x == y for x, y in zip(before, now, strict=False))
