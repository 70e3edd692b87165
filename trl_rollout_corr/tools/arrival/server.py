"""
Check that weights arrive in a vLLM server, through the server's own API.

A server that was started with our extension of its worker tells fingerprints of its weights, as a colocated vLLM does
([`read_server`]). Of any other server, only the effect of the weights can be seen ([`MovementCheck`]), and the names of its
adapters ([`AdapterCheck`]).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import requests
import torch
from packaging.version import Version

from ...messages import notify


MOVED = 0.05  # nats per token, smallest movement of the trainer that a server must follow
SHARE = 0.1  # of the trainer's movement, below which a server stands still
SPARSE = 8  # pushes between looks, at most
MOST = 8  # completions of the fixed text
PATTERNS = "0.32"  # release of vLLM that reads `rank_pattern` and `alpha_pattern` of an adapter
EXTENSION = "trl_rollout_corr.tools.arrival.worker.PackingWorker"
SEE = "See `trl-rollout-corr docs debugging#weights-do-not-arrive`."


def has_extension(config: Any) -> bool:
    """True if the configuration that a server returns names our extension of its worker."""
    parallel = config.get("parallel_config", {}) if isinstance(config, Mapping) else {}
    return bool(parallel.get("worker_extension_cls") == EXTENSION)


def read_server(url: str, names: list[str]) -> dict[str, Any]:
    """Weights that the workers of a server hold: [`~trl_rollout_corr.tools.arrival.fingerprints.read`]."""
    request: Any = {"method": "read_weights", "args": [names]}
    response = requests.post(f"{url}/collective_rpc", json=request, timeout=300)
    response.raise_for_status()
    workers = response.json()["results"]
    held = {
        name: [list(form) for form in zip(*(worker["held"].get(name, forms) for worker in workers), strict=True)]
        for name, forms in workers[0]["held"].items()
    }
    return {**workers[0], "held": held}


def score_text(url: str, model: str, texts: list[list[int]]) -> list[list[float]]:
    """Log-probability of each token of some texts but the first, which a server computes without sampling options."""
    request: Any = {"model": model, "prompt": texts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    response = requests.post(f"{url}/v1/completions", json=request, timeout=300)
    response.raise_for_status()
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    return [
        [places[str(token)]["logprob"] for token, places in zip(text[1:], choice["prompt_logprobs"][1:], strict=True)]
        for text, choice in zip(texts, choices, strict=True)
    ]


def adapters_of(url: str) -> set[str]:
    """Names of the models and adapters of a server."""
    response = requests.get(f"{url}/v1/models", timeout=60)
    response.raise_for_status()
    return {model["id"] for model in response.json()["data"]}


class Scores(NamedTuple):
    """Log-probabilities of the fixed text, each `(N,)` in nats, for `N` tokens of the loss."""

    trainer: torch.Tensor
    server: torch.Tensor


class MovementCheck:
    """
    Compares how far the trainer and a server have moved on a fixed text: the first completions of the run.

    The server scores the text as a prompt, so no option of sampling has an influence. Right after a push both should have the
    same weights. If the trainer has moved by 0.05 nats or more since an earlier look, and the server by less than a tenth of
    that, the server stands still. After two such looks in a row there is a warning.

    Looks are after 1, 3, 7, 15, 23, 31, ... pushes, and once more after the next push where the server stands still. Each look
    needs a forward pass without gradient over one micro-batch, and a request.

    `ask` scores some texts with the server, which the main process alone calls. `temperature` is that of the trainer's
    log-probabilities; the server's are without temperature. `broadcast` takes a list on every rank, and returns the list of
    the main process.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ask: Callable[[list[list[int]]], list[list[float]]],
        temperature: float,
        *,
        is_main_process: bool,
        broadcast: Callable[[list], list],
    ) -> None:
        self.model, self.ask = model, ask
        self.is_main_process, self.broadcast = is_main_process, broadcast
        self.scale = min(temperature, 1.0)  # the logits of a low temperature move further
        self.done = False
        self._score: Callable[[], torch.Tensor] | None = None
        self._before: Scores | None = None
        self._suspect = False
        self._pushes, self._next = 0, 1

    @property
    def needs_text(self) -> bool:
        """True until the check has its text."""
        return not self.done and self._score is None

    def keep(self, batch: Mapping[str, torch.Tensor], mask: torch.Tensor, score: Callable[[], torch.Tensor]) -> None:
        """
        Take the completions of a micro-batch as the fixed text. `mask`, `(B, T)`, is non-zero on the tokens of the loss.
        `score` computes log-probabilities, `(B, T)`, with the weights at the time of the call.
        """
        if "prompt_ids" not in batch:
            self.done = True
            return
        parts = [[batch[f"{part}_{kind}"] for kind in ("ids", "mask")] for part in ("prompt", "completion")]
        prompts, completions = ([x[m.bool()].tolist() for x, m in zip(*part, strict=True)] for part in parts)
        self._texts = [[*p, *c] for p, c in zip(prompts, completions, strict=True)][:MOST]
        self._mask = mask.bool()
        self._chosen = [m[: len(c)].tolist() for m, c in zip(self._mask, completions, strict=True)][:MOST]
        self._score = score

    def pushed(self, step: int, *, announced: bool = False) -> None:
        """Look at server and trainer right after a push, if that is due, and warn if the server stands still."""
        if self.done or self._score is None:
            return
        self._pushes += 1
        if self._pushes < self._next:
            return
        with torch.no_grad(), without_dropout(self.model):
            logps = self._score()[: len(self._texts)]  # on all ranks
        if self.is_main_process:
            self._look(logps[self._mask[: len(logps)]].float().cpu(), step, announced)
        self.done, self._suspect = self.broadcast([self.done, self._suspect])
        self._next = self._pushes + (1 if self._suspect else min(self._pushes + 1, SPARSE))

    def _look(self, logps: torch.Tensor, step: int, announced: bool) -> None:
        try:
            scored = self.ask(self._texts)
        except Exception:  # a server without this API, or one that is busy: no reason to end a run
            self.done = True
            return
        of_completions = [x[-len(chosen) :] for x, chosen in zip(scored, self._chosen, strict=True)]
        pairs = zip(of_completions, self._chosen, strict=True)
        server = torch.tensor([x for scores, chosen in pairs for x, c in zip(scores, chosen, strict=True) if c])
        now, before = Scores(logps, server), self._before
        if before is None or announced:
            self._before = now
            return
        trainer, server = ((x - y).abs().mean() for x, y in zip(now, before, strict=True))
        if trainer * self.scale < MOVED:
            return
        stands = bool(server < SHARE * trainer * self.scale)
        if stands and self._suspect:
            self.done = True
            self._warn(step, float(trainer), float(server))
        self._suspect = stands
        if not stands:
            self._before = now

    def _warn(self, step: int, trainer: float, server: float) -> None:
        notify(
            "A server may have older weights on purpose (then set `trainer.rollout_step` to their optimizer step at each "
            "push), and one with 8 bits, or in bfloat16 beside a trainer in float32, may round small updates away. If neither "
            "is the case, weights do not arrive: "
            f"after the push of optimizer step {step}, the trainer's log-probabilities of a fixed text have moved by "
            f"{trainer:.2g} nats per token, but the vLLM server's have moved by only {server:.2g}. {SEE}"
        )


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Model in evaluation mode, and afterwards as before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class AdapterCheck:
    """
    Checks each adapter that is pushed to a server through files.

    The parameters that train and the files that are pushed are both hashed. If the parameters have changed since the push
    before and the files have not, then something else than the adapter that trains is pushed, and [`AdapterCheck.pushed`]
    raises an error. If the server then lacks the name of the adapter, there is a warning.
    """

    def __init__(self) -> None:
        self._before: tuple[int, str] | None = None
        self._warned = False

    def pushed(self, url: str, name: str, folder: Path, trained: int, step: int) -> None:
        """
        Check a push of the files in `folder` to the server at `url`, after optimizer step `step`, on the main process.
        `trained` is the fingerprint of the parameters that train.
        """
        pushed, before = _hash_of(folder), self._before
        if pushed is None:
            return
        self._before = trained, pushed
        if before is not None and before[1] == pushed and before[0] != trained:
            raise RuntimeError(
                f"The adapter that was pushed after optimizer step {step} is the same, to the last bit, as the one pushed "
                "before, although the trained parameters have changed: the sampler does not get what the trainer learns. "
                f"Check whether another adapter is active, or whether parameters outside the adapter are trained. {SEE}"
            )
        self._ask(url, name, step)

    def _ask(self, url: str, name: str, step: int) -> None:
        try:
            there = adapters_of(url)
        except (requests.RequestException, LookupError, ValueError) as error:
            if not self._warned:
                self._warned = True
                notify(
                    f"From here on, nothing tells whether the vLLM server at {url} has each adapter that is pushed: its list "
                    f"of adapters cannot be read ({type(error).__name__}: {error}). {SEE}"
                )
            return
        if name not in there and not self._warned:
            self._warned = True
            notify(
                "Perhaps several servers share one address, or a server was restarted: after optimizer step "
                f"{step}, the vLLM server at {url} accepted the adapter `{name}`, but does not list it in `/v1/models`. "
                f"It has {', '.join(sorted(there)) or 'none'}. {SEE}"
            )


def served_adapter(model: Any) -> Any:
    """The `LoraConfig` of the adapter of a PEFT model that trains."""
    return model.peft_config[model.active_adapters[0]]


def check_patterns(url: str, adapter: Any) -> None:
    """
    Refuse an adapter with ranks or scales for single layers, where the vLLM server at `url` would serve it with one scale.
    `adapter` is its `LoraConfig`.
    """
    patterns = {name: x for name in ("rank_pattern", "alpha_pattern") if (x := getattr(adapter, name, None))}
    if not patterns:
        return
    response = requests.get(f"{url}/version", timeout=60)
    known = response.json()["version"] if response.ok else None
    if known is not None and Version(Version(known).base_version) >= Version(PATTERNS):
        return
    listed = " and ".join(f"`{name}={x!r}`" for name, x in patterns.items())
    message = (
        f"The adapter has {listed}, and a vLLM before {PATTERNS} multiplies all layers of an adapter that it serves by "
        "`lora_alpha / r`, so that these layers get a wrong scale without a word. Install a newer vLLM on the server, remove "
        "the patterns, or start the server without `--enable-lora`: the adapter is then merged, which is right."
    )
    if known is None:
        notify(f"The server at {url} does not tell its version, so this may not concern it. {message}")
    else:
        raise ValueError(f"{message} The server has vLLM {known}.")


def _hash_of(folder: Path) -> str | None:
    """Hash of the weights in the folder of an adapter; `None` without any."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else None
