"""`RolloutCorrectedAsyncGRPOTrainer` on the real TRL, with samples of known age from a policy that is not the trainer's."""

import dataclasses
import math
from argparse import Namespace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from tests.asynchronous import Flood, ReplicasHere, WorkerHere, build_ours, build_theirs, parts_for_a_cpu
from tests.dumps import read_dump
from tests.tiny import load_model
from tests.training import (
    assert_gradients_equal,
    assert_same_metrics,
    assert_trains,
    backward,
    counting_forwards,
    logged,
    losses,
    messages,
    told,
    window,
)
from trl_rollout_corr import (
    RolloutCorrectedAsyncGRPOConfig,
    RolloutCorrectedAsyncGRPOTrainer,
    RolloutCorrectionConfig,
    compute_rollout_correction,
)
from trl_rollout_corr.asynchronous.placeholders import Placeholder
from trl_rollout_corr.asynchronous.trl_parts import AsyncGRPOTrainer, AsyncRolloutWorker, TreeRow
from trl_rollout_corr.correction.groups import Groups, add_up_groups
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.tools.dump.reading import open_dump
from trl_rollout_corr.tools.monitor.callback import ALARMS
from trl_rollout_corr.trainers.keys import NOT_GIVEN


@pytest.fixture
def make(tiny_model_path, tmp_path):
    """Build a trainer of ours. `worker` are arguments of its rollout worker."""

    def make(worker=None, **fields):
        return build_ours(tiny_model_path, tmp_path, WorkerHere(tiny_model_path, **(worker or {})), **fields)

    return make


@pytest.fixture
def theirs(tiny_model_path, tmp_path):
    return partial(build_theirs, tiny_model_path, tmp_path)


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def micro_batch(trainer):
    """The first micro-batch, as in training at optimizer step 3, and the samples in it in their order."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._step_of_version.update({version: version for version in range(4)})
    trainer.rollout_worker.update_model_version(3)
    trainer.model_version = trainer.state.global_step = 3
    batch = next(iter(trainer.get_train_dataloader()))
    return batch, trainer.rollout_worker.samples[: trainer.args.per_device_train_batch_size]


def unpacked_logps(model, sample):
    """Log-probabilities of the trained tokens of one sample, without any of TRL's code or packing."""
    ids = torch.as_tensor(sample.input_ids)
    logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]][sample.completion_mask[1:] != 0]


def rollout_logps(sample):
    return torch.as_tensor(sample.old_log_probs)[torch.as_tensor(sample.completion_mask) != 0]


# Off means off --------------------------------------------------------------------------------------------------------

OFF = {
    "disabled": {"rollout_correction": "disabled"},
    "trl": {"rollout_correction": "trl"},
    "measured": {
        "rollout_metrics_only": True,
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": 1.1,
    },
    "nothing to correct": {"rollout_is": None},
}


@pytest.fixture(scope="module")
def plain(tiny_model_path, tmp_path_factory):
    """A run of TRL's trainer."""
    trainer = build_theirs(tiny_model_path, tmp_path_factory.mktemp("plain"), logging_steps=1)
    return losses(trainer), trainer.state.log_history, weights_of(trainer)


@pytest.mark.parametrize("off", OFF)
def test_off_is_bit_for_bit_trl(make, plain, off):
    steps, history, weights = plain
    trainer = make(**OFF[off], logging_steps=1)
    assert losses(trainer) == steps
    assert all(torch.equal(p, weights[name]) for name, p in weights_of(trainer).items())
    for found, expected in zip(trainer.state.log_history, history, strict=True):  # and its metrics are all there
        same = {key for key in expected if not key.startswith(("perf", "train_")) and not key.endswith("_s")}
        assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    assert all(value > 0 for value in logged(trainer, "k3_kl"))


MODES = {
    "decoupled": {},
    "reinforce": {"bypass_mode": True, "rollout_loss_type": "reinforce"},
    "ppo_clip": {"bypass_mode": True, "rollout_clip_ratio_c": 1.1},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_correction_costs_no_forward(make, mode):
    trainer = make(**MODES[mode], rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold=1.5)
    with counting_forwards(trainer) as count:
        assert_trains(trainer)
    assert count["forwards"] == 3 * 2


# Gradients against autograd on the samples one by one -----------------------------------------------------------------


def expected_loss(model, samples, mode, level, accumulation):
    """The loss written out, sample by sample."""
    n_tokens = sum(int(sample.completion_mask.sum()) for sample in samples)
    total = 0.0
    for sample in samples:
        logps, rollout, advantage = unpacked_logps(model, sample), rollout_logps(sample), float(sample.advantage)
        current = logps.detach()
        d = current - rollout
        exponent = {"token": d, "sequence": d.sum(), "geometric": d.mean(), None: torch.zeros(())}[level]
        weights = exponent.exp().clamp(max=2.0) * torch.ones_like(d)
        keep = d**2 / 2 <= 0.03
        if mode == "reinforce":
            total = total - (weights * keep * advantage * logps).sum()
            continue
        ratio = (logps - (rollout if mode == "ppo_clip" else current)).exp()
        objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if mode == "ppo_clip":
            weights = torch.where((advantage < 0) & (ratio.detach() > 1.1), 0.0, 1.0)
        total = total - (weights * keep * objective).sum()
    return total / n_tokens / accumulation


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_loss_written_out(make, tiny_model_path, mode, level):
    """With two turns, and completions that share a prompt in the row."""
    worker = {"turns": 2, "noise": 0.25, "group": 2}
    fields = {"rollout_is": level, "rollout_rs": "token_k2", "rollout_rs_threshold": 0.03}
    trainer = make(worker, per_device_train_batch_size=8, **MODES[mode], **fields)
    batch, samples = micro_batch(trainer)
    assert batch["attention_mask"].sum() < sum(len(sample.input_ids) for sample in samples)
    found = backward(trainer.model, trainer.compute_loss(trainer.model, batch))
    assert {sample.advantage > 0 for sample in samples} == {True, False}
    assert 0 < logged_now(trainer, "rollout_rs_masked_fraction") < 1
    model = load_model(tiny_model_path)
    expected = backward(model, expected_loss(model, samples, mode, level, 2))
    assert_gradients_equal(found, {name: gradient for name, gradient in expected.items() if name in found})
    assert set(found) == set(expected)


def logged_now(trainer, key):
    return window(trainer).finish()[PREFIX + key]


def test_batch_normalisation_gives_weights_a_mean_of_one(make):
    trainer = make(rollout_is="token", rollout_is_batch_normalize=True)
    batch, _ = micro_batch(trainer)
    trainer.compute_loss(trainer.model, batch)
    statistics = window(trainer)
    assert statistics["coefficients"] / statistics["tokens"] == pytest.approx(1.0, abs=1e-5)


# Packed rows ----------------------------------------------------------------------------------------------------------


def test_a_packed_row_equals_its_samples(tiny_model_path):
    """To 1e-6, in float64: shared prompts, a shared prefix of completions, one sample twice, and two turns."""
    worker = WorkerHere(tiny_model_path, turns=2)
    samples = [worker.sample(i) for i in range(6)]
    samples.append(worker.sample(0))
    fork = worker.sample(1)
    fork.input_ids = np.concatenate([samples[0].input_ids[:-2], [7, 8, 9]])
    fork.completion_mask = np.concatenate([samples[0].completion_mask[:-2], [1, 1, 1]])
    fork.old_log_probs = np.zeros(len(fork.input_ids), dtype=np.float32)
    samples.append(fork)
    row = TreeRow()
    for sample in samples:
        row.add(dataclasses.asdict(sample))
    packed = row.pack()
    assert len(packed["input_ids"]) < sum(len(sample.input_ids) for sample in samples) * 0.9
    longest, path = packed["tree_max_seqlens"].tolist()
    plain, tree = (load_model(tiny_model_path, torch.float64).eval() for _ in range(2))
    parts = parts_for_a_cpu()
    parts.register_tree_attention()
    tree.set_attn_implementation(parts._TRL.TREE_ATTENTION)
    logits = tree(
        input_ids=packed["input_ids"][None],
        position_ids=packed["position_ids"][None],
        tree_kv_index=packed["tree_kv_index"],
        tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
        tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
        tree_max_seqlen_q=longest,
        tree_max_seqlen_k=path,
        use_cache=False,
    ).logits[0]
    labels = packed["shift_labels"].clamp(min=0)
    logps = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0][packed["token_index"]]
    expected = torch.cat([unpacked_logps(plain, sample) for sample in samples])
    assert (logps - expected).abs().max() < 1e-6
    found, expected = (backward(m, x.square().sum()) for m, x in ((tree, logps), (plain, expected)))
    scale = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():  # the norms of transformers are in float32
        assert (found[name] - gradient).abs().max() < 1e-6 * scale, name


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_a_token_sees_what_is_before_it_in_its_sample(sliding_window):
    row, samples = TreeRow(), [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9], [1, 2, 7], [8, 8, 8, 8], [1, 2, 3, 9, 9, 7]]
    for ids in samples:
        ones = np.ones(len(ids))
        row.add(
            {
                "input_ids": np.array(ids),
                "completion_mask": ones,
                "old_log_probs": ones,
                "advantage": 1.0,
                "group_id": 0,
            }
        )
    packed = row.pack()
    visible = parts_for_a_cpu().visible_tokens(
        packed["tree_kv_index"], packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"], sliding_window
    )
    places = packed["token_index"].split([len(ids) - 1 for ids in samples])  # of all tokens but the last of a sample
    for path in places:
        for depth, place in enumerate(path.tolist()):
            first = 0 if sliding_window is None else max(depth + 1 - sliding_window, 0)
            assert visible[place].nonzero().flatten().tolist() == sorted(path[first : depth + 1].tolist())


def test_a_tensor_that_is_awaited_is_filled_where_it_was_taken():
    placeholder, selected = Placeholder(torch.zeros(2, 3)), torch.tensor([[True, False, True], [False, True, False]])
    taken = placeholder[selected]
    assert taken.isnan().all()
    assert not placeholder.was_taken
    placeholder.fill(selected, torch.tensor([1.0, 2.0, 3.0]))
    assert taken.tolist() == placeholder[selected].tolist() == [1.0, 2.0, 3.0]
    assert placeholder.was_taken


# Age ------------------------------------------------------------------------------------------------------------------


def test_the_age_of_the_weights_travels_with_each_sample(make):
    trainer = make({"lags": (0, 1, 3), "group": 1}, max_steps=6, weight_sync_steps=2, logging_steps=6)
    trainer.train()
    samples = enumerate(trainer.rollout_worker.samples[:48])  # eight in a step
    ages = [i // 8 - 2 * (sample.model_version - 1) for i, sample in samples if sample.model_version]  # 0: not known
    assert len(set(ages)) > 3
    assert logged(trainer, "staleness_mean") == [pytest.approx(np.mean(ages))]
    assert logged(trainer, "staleness_max") == [max(ages)]


def test_who_is_dropped_as_stale_is_counted(make):
    trainer = make({"lags": (0, 1, 2, 0, 3)}, max_staleness=1, max_steps=6, logging_steps=6)
    made_by = trainer.rollout_worker
    versions = []
    get = made_by.get

    def noting_the_version(timeout=None):
        versions.append(made_by.model_version)
        return get(timeout)

    made_by.get = noting_the_version
    trainer.train()
    pairs = list(zip(made_by.samples, versions, strict=True))
    dropped = [sample for sample, version in pairs if version - sample.model_version > 1]
    trained = [sample for sample, version in pairs if version - sample.model_version <= 1][:48]
    assert len(dropped) > 10
    assert logged(trainer, "stale_dropped/fraction") == [pytest.approx(len(dropped) / (len(dropped) + len(trained)))]
    assert [entry["sample/dropped_stale_total"] for entry in trainer.state.log_history if "loss" in entry] == [
        len(dropped)
    ]


# Samples that cannot be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_sample_rejected_trains_on_nothing(make, mode):
    trainer = make({"noise": 1.0, "lags": (9,)}, **MODES[mode], rollout_rs="seq_max_k2", rollout_rs_threshold=1e-9)
    assert losses(trainer) == [(0.0, 0.0)] * 3
    assert logged(trainer, "rollout_rs_masked_fraction") == [1.0] * 3


EMPTY = {**OFF, "auto": {"rollout_correction": "auto"}, **MODES}


@pytest.mark.parametrize("setting", EMPTY)
def test_a_row_without_a_token_of_the_loss_adds_nothing(make, theirs, tiny_model_path, setting, tmp_path):
    """TRL 1.16 raises an error there. The other micro-batch of the step has the gradient of TRL."""
    numbers = count()

    def without_loss(sample):
        if next(numbers) % 2:
            sample.completion_mask[:] = 0

    fields = {
        "per_device_train_batch_size": 1,
        "max_steps": 1,
        "logging_steps": 1,
        "rollout_dump_dir": str(tmp_path / "d"),
    }
    trainer = make({"change": without_loss}, **EMPTY[setting], **fields)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["ratio"] == 1.0 or setting != "auto"  # the loss term of the empty row has a ratio of 1
    assert all(math.isfinite(entry[key]) for key in ("loss", "grad_norm", "kl", f"{PREFIX}k3_kl"))
    if setting in OFF:
        whole = theirs(WorkerHere(tiny_model_path), per_device_train_batch_size=1)
        whole.current_gradient_accumulation_steps = whole.args.gradient_accumulation_steps
        loss = whole.compute_loss(whole.model.train(), next(iter(whole.get_train_dataloader())))
        norm = torch.stack([g.norm() for g in backward(whole.model, loss).values()]).norm()
        assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize(
    ("mode", "value"), [*((mode, math.nan) for mode in MODES), ("decoupled", -math.inf), ("ppo_clip", -9999.0)]
)
def test_a_log_probability_that_is_none_hurts_nobody(make, mode, value):
    def break_first(sample):
        sample.old_log_probs[-1] = value

    trainer = make(
        {"change": break_first, "min_length": 2}, **MODES[mode], rollout_is="token", rollout_nan_policy="drop"
    )
    assert_trains(trainer)
    assert all(0 < share < 1 for share in logged(trainer, "nonfinite_fraction"))


@pytest.mark.parametrize("off", ["trl", "disabled", "measured"])
@pytest.mark.parametrize("value", [None, math.nan, -math.inf, -9999.0, -200.0])
def test_trl_keeps_a_finite_loss_without_a_log_probability(make, tiny_model_path, off, value):
    """
    The token gets a ratio of 1 where the number is missing, as in TRL's other trainers. Where the ratio is infinite, the
    token has no gradient, as if it were clipped. TRL's own asynchronous loss or its gradient would be NaN or infinite.
    """

    def break_last(sample):
        sample.old_log_probs = [*sample.old_log_probs[:-1].tolist(), value]

    trainer = make({"change": break_last, "min_length": 2, "noise": 0.25}, **OFF[off])
    batch, samples = micro_batch(trainer)
    found = trainer.compute_loss(trainer.model, batch)
    total, model = 0.0, load_model(tiny_model_path)
    for sample in samples:
        logps, rollout = unpacked_logps(model, sample), rollout_logps(sample)
        given = rollout != NOT_GIVEN
        finite = given & (logps.detach() - rollout).exp().isfinite()
        assert finite.tolist() == [True] * (len(finite) - 1) + [False]
        ratio = (logps - torch.where(finite, rollout, logps.detach())).exp()
        losses_of_tokens = torch.min(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        total = total - losses_of_tokens[finite | rollout.isnan() | ~given].sum()
    n_tokens = sum(int(sample.completion_mask.sum()) for sample in samples)
    assert found.item() == pytest.approx(float(total) / n_tokens / 2, rel=1e-5, abs=1e-7)
    assert_gradients_equal(backward(trainer.model, found), backward(model, total / n_tokens / 2))


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("value", [None, -9999.0])
def test_a_run_with_the_loss_of_trl_goes_on_without_log_probabilities(make, value):
    def break_last(sample):
        sample.old_log_probs = [*sample.old_log_probs[:-1].tolist(), value]

    trainer = make({"change": break_last, "min_length": 2, "noise": 0.25}, rollout_correction="trl")
    assert_trains(trainer)


def test_a_dump_tells_none_from_nan(make, tmp_path):
    def break_two(sample):
        sample.old_log_probs = [*sample.old_log_probs[:-2].tolist(), None, math.nan]

    folder = str(tmp_path / "dump")
    make({"change": break_two, "min_length": 3}, rollout_dump_dir=folder, max_steps=1).train()
    for row in read_dump(folder).rows:
        assert row["rollout_logps"][-2] is None
        assert math.isnan(row["rollout_logps"][-1])
        assert None not in row["rollout_logps"][:-2]


def lose_logps(sample):
    sample.old_log_probs = None


def cut_logps(sample):
    sample.old_log_probs = sample.old_log_probs[:-1]


def lift_logps(sample):
    sample.old_log_probs[-1] = 1.0


def lift_logps_beyond(sample):
    sample.old_log_probs[-1] = math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_logps, "without log-probabilities"),
        (cut_logps, "one entry per token"),
        (lift_logps_beyond, r"`old_log_probs\[\d+\]` is inf, but a log-probability is at most 0"),
        (lift_logps, r"`old_log_probs\[\d+\]` is 1, but a log-probability is at most 0"),
    ],
)
def test_missing_log_probabilities_are_one_clear_error(make, change, message):
    with pytest.raises(ValueError, match=message):
        make({"change": change}).train()


# Metrics, dump and monitor --------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_other_trainers_on_the_same_tensors(make):
    fields = {
        "rollout_is": "sequence",
        "rollout_rs": ["token_k1", "seq_mean_k3"],
        "rollout_rs_threshold": [1.2, 0.02],
    }
    trainer = make({"turns": 1}, **fields)
    batch, samples = micro_batch(trainer)
    trainer.compute_loss(trainer.model, batch)
    model = load_model(trainer.model.config._name_or_path)
    length = max(int(sample.completion_mask.sum()) for sample in samples)
    train, rollout = torch.full((len(samples), length), math.nan), torch.full((len(samples), length), math.nan)
    for row, sample in enumerate(samples):
        with torch.no_grad():
            logps = unpacked_logps(model, sample)
        train[row, : len(logps)], rollout[row, : len(logps)] = logps, rollout_logps(sample)
    advantages = torch.tensor([sample.advantage for sample in samples])
    rewards = torch.tensor([sample.metrics["reward"] for sample in samples])
    correction = compute_rollout_correction(
        train, rollout, ~train.isnan(), RolloutCorrectionConfig(**fields), advantages=advantages
    )
    assert_same_metrics(window(trainer).finish(), correction.metrics())
    groups = add_up_groups(correction.valid, correction.keep, correction.coefficients, advantages, rewards)
    options = {"rejects": True, "weighs": True}
    assert_same_metrics(window(trainer, Groups).finish(**options), groups.finish(**options))


def test_the_dump_has_prompts_completions_and_ages(make, tmp_path):
    trainer = make({"turns": 2, "lags": (0, 1), "group": 1}, rollout_dump_dir=str(tmp_path / "dump"), max_steps=4)
    trainer.train()
    rows = read_dump(tmp_path / "dump").rows
    samples = trainer.rollout_worker.samples
    texts = {trainer.processing_class.decode(sample.input_ids).replace(" ", "") for sample in samples}
    assert rows
    assert {row["staleness"] for row in rows} >= {0, 1}
    assert open_dump(tmp_path / "dump").about["pushed"] == "weights"
    assert len({len(row["prompt_ids"]) for row in rows}) > 1
    assert {row["padding"] for row in rows} == {0}  # packed
    for row in rows:
        assert (row["prompt"] + row["completion"]).replace(" ", "") in texts


def test_the_types_of_the_server_are_in_the_dump(make, tmp_path, monkeypatch):
    """They are known when the first weights are pushed, which is after the trainer is built."""
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"))
    model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16"}
    server = {"model_config": model, "cache_config": {"cache_dtype": "fp8_e5m2"}}
    monkeypatch.setattr("trl_rollout_corr.asynchronous.server_pushes.AsyncRolloutWorker", WorkerHere)
    monkeypatch.setattr(trainer, "vllm_client", Namespace(server_url="http://there"), raising=False)
    monkeypatch.setattr("trl_rollout_corr.trainers.batches.read_configuration", lambda url: server)
    with (
        pytest.warns(UserWarning, match="The trainer computes in float32 and the sampler in bfloat16"),
        pytest.warns(UserWarning, match="keeps keys and values in fp8_e5m2, .* without `--kv-cache-dtype`"),
    ):
        trainer.train()
    about = open_dump(tmp_path / "dump").about
    assert (about["sampler_dtype"], about["kv_cache_dtype"]) == ("bfloat16", "fp8_e5m2")


@pytest.mark.parametrize("dumped", [False, True])
def test_the_first_step_is_diagnosed_and_what_is_set_is_not_advised(make, tmp_path, caplog, dumped):
    def far_off(sample):
        noise = np.where(np.asarray(sample.input_ids) % 2, 0.3, -0.3)
        sample.old_log_probs = np.where(sample.completion_mask != 0, sample.old_log_probs - noise, 0.0)

    folder = {"rollout_dump_dir": str(tmp_path / "dump")} if dumped else {}
    for correction in ("auto", "disabled"):
        worker = {"min_length": 6, "change": far_off}
        make(
            worker,
            rollout_diagnose=True,
            rollout_correction=correction,
            max_steps=1,
            per_device_train_batch_size=32,
            **folder,
        ).train()
        printed = "\n".join(told(caplog))
        caplog.clear()
        assert "Diagnosis of step 1. Possible: weights that differ from the trainer's" in printed
        assert ("rollout_correction: auto" in printed) is (correction == "disabled")
        folder = {"rollout_dump_dir": str(tmp_path / "another")} if dumped else {}


def test_the_monitor_raises_alarms(make):
    def shift(sample):
        sample.old_log_probs = np.where(sample.completion_mask != 0, sample.old_log_probs - 3.0, 0.0)

    trainer = make({"change": shift}, rollout_monitor="warn", max_steps=4, logging_steps=1)
    trainer.train()
    assert trainer.state.log_history[-2][ALARMS] > 0


@pytest.mark.parametrize("off", ["trl", "disabled", "measured"])
def test_a_gap_around_which_trls_loss_clips_is_called_corrected(make, caplog, off):
    """The loss is the same in all three, so the alarm is, too."""

    def shift(sample):
        sample.old_log_probs = np.where(sample.completion_mask != 0, sample.old_log_probs - 1.0, 0.0)

    fields = {"rollout_monitor": "warn", "rollout_monitor_bounds": {"k3_at_start": None}, "max_steps": 2}
    make({"change": shift}, **fields, **OFF[off]).train()
    told = " ".join(messages(caplog))
    assert "[k3_corrected > 0.03]" in told
    assert "the run corrects for it" in told
    assert "nothing corrects" not in told


@pytest.mark.parametrize("misses", [(), (2, 4, 6, 8), (3, 5, 7, 9)])
def test_scores_after_pushes_reach_the_alarm(make, tiny_model_path, monkeypatch, caplog, misses):
    """Each of them, also those after the first push, and where every step is logged."""
    from trl_rollout_corr.asynchronous.server_pushes import PushesToServer
    from trl_rollout_corr.pushes import scoring_sampler

    replicas = ReplicasHere(tiny_model_path, misses)
    monkeypatch.setattr(scoring_sampler, "score_on_server", replicas.score)
    monkeypatch.setattr(PushesToServer, "server", "http://here")
    server = {"parallel_config": {"data_parallel_size": 2}, "model_config": {"logprobs_mode": "processed_logprobs"}}
    monkeypatch.setattr("trl_rollout_corr.trainers.batches.read_configuration", lambda url: server)
    # as if 9, the odd ones, were far away
    monkeypatch.setattr("trl_rollout_corr.pushes.rescore.is_due", {1, 2, 4, 9}.__contains__)
    fields = {"max_steps": 10, "logging_steps": 1, "learning_rate": 1e-4}
    trainer = make({"lags": (0,)}, extra={"weight_transfer": replicas}, rollout_monitor="warn", **fields)
    steps = losses(trainer)
    fresh = [(entry["step"], entry.get(f"{PREFIX}fresh_k3_kl")) for entry in trainer.state.log_history]
    fresh = {step: value for step, value in fresh if value is not None}
    assert [*fresh] == [1, 2, 4, 9]  # the step after the push; the first push is before training
    lost = [step for step, value in fresh.items() if value > 1e-5]
    assert lost == [step for step in (2, 4, 9) if step in misses]
    told = [message for message in messages(caplog) if "[fresh_gap" in message]
    assert [f"step {lost[0]}:" in message for message in told] == [True] if lost else not told
    if not misses:  # and nothing reaches the loss
        assert steps == losses(make({"lags": (0,)}, **fields))


@pytest.mark.parametrize(("requests", "longest"), [(None, 7), (9, 9), (3, 7)])
def test_a_server_scores_texts_for_whose_logits_it_has_memory(make, tiny_model_path, monkeypatch, requests, longest):
    """It computes the logits of a whole text at once, so that long completions are cut."""
    from trl_rollout_corr.asynchronous.server_pushes import PushesToServer
    from trl_rollout_corr.pushes import rescore, scoring_sampler

    replicas, lengths = ReplicasHere(tiny_model_path), []

    def score(url, name, text, replica):
        lengths.append(len(text))
        return replicas.score(url, name, text, 0)

    monkeypatch.setattr(scoring_sampler, "score_on_server", score)
    monkeypatch.setattr(scoring_sampler, "OF_SERVER", 7)
    monkeypatch.setattr(PushesToServer, "server", "http://here")
    monkeypatch.setattr(rescore, "FEWEST", 1)
    server = {"scheduler_config": {"max_num_seqs": requests}, "model_config": {"logprobs_mode": "processed_logprobs"}}
    monkeypatch.setattr("trl_rollout_corr.trainers.batches.read_configuration", lambda url: server)
    trainer = make({"lags": (0,)}, extra={"weight_transfer": replicas}, rollout_monitor="warn", max_steps=3)
    losses(trainer)
    assert max(lengths) == longest
    fresh = [entry[f"{PREFIX}fresh_k3_kl"] for entry in trainer.state.log_history if f"{PREFIX}fresh_k3_kl" in entry]
    assert fresh
    assert max(fresh) < 1e-5


# Refused --------------------------------------------------------------------------------------------------------------


NORMALISED = {"rollout_is": "sequence", "rollout_is_batch_normalize": True}


@pytest.mark.parametrize(
    ("fields", "scope"),
    [
        ({**NORMALISED, "token_budget": None}, "may be"),  # the default
        ({**NORMALISED, "token_budget": 512}, "may be"),
        ({**NORMALISED, "token_budget": 0, "per_device_train_batch_size": 1}, "is"),
        ({**NORMALISED, "token_budget": 512, "bypass_mode": True, "rollout_loss_type": "reinforce"}, "may be"),
        ({**NORMALISED, "token_budget": None, "rollout_is": "token"}, None),
        ({**NORMALISED, "token_budget": 0}, None),
    ],
)
def test_a_row_of_one_completion_is_not_normalised(make, fields, scope):
    if scope is None:
        assert make(**fields).args.rollout_is_batch_normalize
        return
    with pytest.raises(
        ValueError, match=f"in an asynchronous run .* {scope} one completion: its weight would be 1. Set"
    ):
        make(**fields)


def test_settings_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`rollout_support` is 'replay', which needs a colocated vLLM"):
        RolloutCorrectedAsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, rollout_support="replay")
    with pytest.raises(ValueError, match="`rollout_routing` is 'replay', but the rollout worker"):
        RolloutCorrectedAsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, rollout_routing="replay")


def test_a_loss_that_has_moved_is_refused(make, monkeypatch):
    original = AsyncGRPOTrainer.compute_loss

    def twice(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        original(self, model, inputs)
        return original(self, model, inputs)

    monkeypatch.setattr(AsyncGRPOTrainer, "compute_loss", twice)
    with pytest.raises(RuntimeError, match="ran the policy 2 times"):
        make().train()


def test_another_loss_is_refused(tiny_model_path, tmp_path):
    class Other(AsyncGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Mixed(RolloutCorrectedAsyncGRPOTrainer, Other):
        pass

    with pytest.raises(TypeError, match="inherits `compute_loss` from `Other`"):
        build_ours(tiny_model_path, tmp_path, trainer_class=Mixed)


# What a terminal shows -------------------------------------------------------------------------------------------------


def test_the_process_of_the_worker_warns_and_ends_by_itself_when_nobody_takes_its_samples(
    tiny_model_path, tmp_path, capfd
):
    worker = AsyncRolloutWorker(queue_maxsize=64)
    worker._loop_cls = Flood
    build_ours(tiny_model_path, tmp_path, worker)
    worker.start()
    process = worker._process
    worker.stop()
    assert process.exitcode == 0  # TRL kills it after 15 seconds, which is -15
    assert capfd.readouterr().err.count("a warning of the worker") == 1
