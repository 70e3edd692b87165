"""
Version of the weights that sampled each token, from a vLLM server that tells it (0.32 with `--enable-scale-out`).

The trainer labels the weights on the server at each push, before requests go on ([`LabellingTransfer`]). The rollout worker
asks the endpoint whose answers have the label of every token ([`VersionedLoop`]), and its samples carry the labels to
[`~trl_rollout_corr.asynchronous.samples.AnnotatedSamples`].

Versions only refine the age of tokens. No answer about versions, and no missing one, ends a worker or a run: such tokens are
of an unknown version, and a warning says so once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import requests

from ..messages import notify
from .trl_parts import RolloutLoop, RolloutSample


_COMPLETIONS, _GENERATE = "/v1/completions", "/inference/v1/generate"
_NO_SAMPLING = ("model", "prompt", "return_token_ids")  # fields of a request that are not sampling parameters
_UNKNOWN = -1  # version of a token that is not sampled, or without a label
_LARGEST = 2**31 - 1  # of a version, which counts pushes
_CONSEQUENCE = (
    "For such tokens, the version of the weights is unknown. They get the age of the weights that began their completion. "
    "Training goes on, because the age of tokens affects only metrics. This message appears once."
)
# Of an answer that has another form than in vLLM 0.32
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError)


def ask_for_versions(trainer: Any) -> None:
    """
    Ask the server of a trainer for the version of each token, from its latest weights on, if it tells versions. An adapter,
    which has no weight transfer, finishes the completions that it began.
    """
    worker, transfer = trainer.rollout_worker, trainer.weight_transfer
    if transfer is None or getattr(worker, "_loop_cls", None) is not RolloutLoop:
        return
    url = trainer.vllm_client.server_url
    if not _tells_versions(url):
        return
    if refusal := _label(url, trainer.model_version):
        notify(refusal)
        return
    trainer.weight_transfer = LabellingTransfer(transfer, trainer)
    worker._loop_cls = VersionedLoop


def _tells_versions(url: str) -> bool:
    """True if the server at an address tells the version of the weights of each token."""
    request: Any = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    try:
        response = requests.post(f"{url}{_GENERATE}", json=request, timeout=300)
        return response.ok and response.json()["choices"][0].get("weight_versions") is not None
    except (requests.RequestException, *_UNREADABLE):
        return False


def _label(url: str, version: int) -> str:
    """Label the weights of the server, with the version of tokens from now on. Returns a complaint, empty if there is none."""
    response = requests.post(f"{url}/update_weight_version", json={"new_version": str(version)}, timeout=300)
    if response.ok:
        return ""
    return (
        f"The vLLM server at {url} refused version {version} as the label of its weights (status {response.status_code}: "
        f"{response.text[:200]}). {_CONSEQUENCE}"
    )


class LabellingTransfer:
    """A weight transfer that labels the weights on the server before requests go on, with the version after `trainer`'s."""

    def __init__(self, transfer: Any, trainer: Any) -> None:
        self._transfer, self._trainer = transfer, trainer
        self._refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def resume(self) -> None:
        """Label the weights, and resume requests."""
        refusal = _label(self._trainer.vllm_client.server_url, self._trainer.model_version + 1)
        if refusal and not self._refused:
            self._refused = True
            notify(refusal)
        self._transfer.resume()


# In the process of the rollout worker ---------------------------------------------------------------------------------


class _Sampled(float):
    """Log-probability of a token, with the version of the weights that sampled it. Lists of TRL carry both."""

    version: int

    @classmethod
    def by(cls, version: int, logp: float) -> "_Sampled":
        sampled = cls(logp)
        sampled.version = version
        return sampled


@dataclass(slots=True)
class VersionedSample(RolloutSample):
    """A sample with the version of the weights that sampled each token, `(L,)`; -1 where it is not known."""

    versions: np.ndarray | None = None


class VersionedLoop(RolloutLoop):  # type: ignore[misc, valid-type]
    """TRL's loop of the rollout worker, with samples that know the version of the weights of each token."""

    _asks_for_versions = True
    _complained = False

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != _COMPLETIONS or not self._asks_for_versions:
            return dict(await super()._post(path, payload, *args, **kwargs))
        try:
            answer, complaint = _as_completion(
                await super()._post(_GENERATE, _as_generation(payload, self.model_version), *args, **kwargs)
            )
        except Exception as error:
            status = getattr(error, "status", None)  # of an answer of HTTP; an error without an answer is left to TRL
            if status is None and not isinstance(error, _UNREADABLE):
                raise
            # TRL's own request, whose error is raised if the server fails there as well
            answer = dict(await super()._post(path, payload, *args, **kwargs))
            self._asks_for_versions = status is not None and status >= 500  # which may pass
            complaint = f"{_GENERATE} failed with {error!r}, but {path} works"
        if complaint and not self._complained:
            self._complained = True
            fault = f"does not tell the version of all tokens: {complaint}"
            notify(f"The vLLM server at {self.vllm_server_url} {fault}. {_CONSEQUENCE}")
        return answer

    async def _score_group(self, group: Any) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        rows = [row for of_one in group.completions_sequences for row in of_one]
        return [_versioned(sample, row.old_log_probs) for sample, row in zip(samples, rows, strict=True)]


def _versioned(sample: RolloutSample, logps: list[float]) -> VersionedSample:
    versions = np.array([getattr(logp, "version", _UNKNOWN) for logp in logps], dtype=np.int64)
    return VersionedSample(**{x.name: getattr(sample, x.name) for x in fields(sample)}, versions=versions)


def _as_generation(payload: Mapping[str, Any], version: int) -> dict[str, Any]:
    """
    The request for `/inference/v1/generate` that asks for the same as one for `/v1/completions`. Cached prefixes are shared
    among requests of one version only, so that none was computed by older weights, even if the server keeps its cache.
    """
    of_request = {"model": payload["model"], "token_ids": payload["prompt"], "cache_salt": str(version)}
    return {**of_request, "sampling_params": {k: v for k, v in payload.items() if k not in _NO_SAMPLING}}


def _as_completion(answer: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """
    An answer of `/inference/v1/generate` as one of `/v1/completions`, whose log-probabilities know their versions; and a
    complaint about the versions, empty if there is none.
    """
    choices, complaint = [], ""
    if not answer["choices"]:
        raise ValueError("no completion in the answer")
    for choice in answer["choices"]:
        tokens = choice["logprobs"]["content"]
        versions, fault = versions_of(choice.get("weight_versions"), len(tokens))
        complaint = complaint or fault
        rows = zip(choice["token_ids"], tokens, versions.tolist(), strict=True)
        logps = [
            _Sampled.by(version, math.nan if (x := token["logprob"]) is None else x) for _, token, version in rows
        ]
        choices.append({**choice, "logprobs": {"token_logprobs": logps}})
    return {**answer, "choices": choices}, complaint


def versions_of(spans: object, length: int) -> tuple[np.ndarray, str]:
    """
    Version of each token of a completion, `(length,)`, and a complaint, empty if there is none.

    Args:
        spans (`object`):
            Value of `weight_versions` in an answer, which should be a list of `{"version": "3", "start": 0, "end": 5}`, in
            tokens of the completion. Anything else is not an error: tokens without a readable span get -1, and so does a token
            that two spans give different versions. A label that is not a number, such as the label of weights before the
            first push, gives -1 without a complaint.
        length (`int`):
            Number of tokens of the completion.
    """
    versions = np.full(length, _UNKNOWN, dtype=np.int64)
    covered, contested = np.zeros(length, dtype=bool), np.zeros(length, dtype=bool)
    for span in spans if isinstance(spans, list) else ():
        if not isinstance(span, Mapping) or not all(type(span.get(name)) is int for name in ("start", "end")):
            continue
        version = _version(span.get("version"))
        if version is None:
            continue
        here = slice(max(span["start"], 0), max(span["end"], 0))
        contested[here] |= covered[here] & (versions[here] != version)
        versions[here], covered[here] = version, True
    versions[contested] = _UNKNOWN
    if covered.all() and not contested.any():
        return versions, ""
    counts = f"{int(contested.sum())} of them two versions and {int((~covered).sum())} none"
    return versions, f"`weight_versions` is {str(spans)[:200]} for {length} tokens, which assigns {counts}"


def _version(label: object) -> int | None:
    """The number in a label; -1 if its text is not a number; `None` if the value cannot be a label."""
    if type(label) is int:
        return label if 0 <= label <= _LARGEST else None
    if not isinstance(label, str):
        return None
    return int(label) if label.isascii() and label.isdecimal() and len(label) < 10 else _UNKNOWN
