"""
What is compared, as data: ways to correct, and the situations they are tried in. `PROTOCOL.md` says why. No torch here.

A *cell* is a situation: task, trainer, age of the sampler, learning rate, and what else is wrong with the sampler. An *arm* is
a way to correct. A *stage* is what is run for a purpose. Its runs are in the order in which they are done, cell by cell and
seed by seed, so that what an interrupted stage has done is balanced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


STEPS = 120
SEEDS = [0, 1, 2]
LONG, MID = 600, 300  # steps of `long` and `mid` runs
NOISE = 0.1
RATES = {"slower": 2e-5, "slow": 5e-5, "fast": 1e-4, "faster": 2e-4}
# What may be wrong with a sampler beside its age. Every second completion has a token that no answer has: the sampler reports
# that it was sure of the token, and an exact reward forgives one. Or vLLM rounds the weights to 8 bits at each push. Or each
# weight of the sampler differs by a fixed share of itself, drawn once from a normal distribution of this standard deviation.
# Or no push arrives, and the sampler says that all do. Or the share is twice as large; or the first half of each batch is
# written by the newest weights; or the sampler is old and says that it is not; or the share grows all the time.
FAULTS: dict[str, dict[str, Any]] = {
    "garbage": {"garbage": 0.5},
    "fp8": {"quantization": "fp8_per_channel"},
    "noise": {"noise": NOISE},
    "lost": {"lost": True},
    "loud": {"noise": 2 * NOISE},
    "mixed": {"mixed": True},
    "silent": {"announced": False},
    "swelling": {"noise": [0.01, 2 * NOISE]},
}
# Other ways to train: with several updates per generation, without an adapter where others have one, with more steps, and
# with a sampler that says how old it is where others do not
WAYS: dict[str, dict[str, Any]] = {
    "several": {"steps_per_generation": 4, "num_iterations": 2},
    "all_weights": {},
    "long": {},
    "mid": {},
    "announced": {},
}


@dataclass(frozen=True)
class Rung:
    """How many optimizer steps the sampler is behind, and the learning rate."""

    lag: int
    rate: str


@dataclass(frozen=True)
class Arm:
    """
    A way to correct.

    Args:
        name (`str`):
            Name in files and tables.
        options (`dict`, *optional*):
            Fields of the trainer's configuration.
        rule (`str`, *optional*):
            One of `rules.RULES`, which are not in the package.
        trl (`bool`, *optional*, defaults to `False`):
            Whether to train with TRL's own trainer.
        in_step (`bool`, *optional*, defaults to `False`):
            Whether the sampler is the policy itself, whatever the cell says: the best there could be.
        past (`bool`, *optional*, defaults to `False`):
            Whether the package no longer has this rule, so that its runs are published and none is trained.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rule: str | None = None
    trl: bool = False
    in_step: bool = False
    past: bool = False


@dataclass(frozen=True)
class Cell:
    """A situation."""

    task: str
    rung: Rung
    algorithm: str = "grpo"
    fault: str | None = None
    way: str | None = None  # of training, one of `WAYS`

    @property
    def name(self) -> str:
        lag = f"lag_{self.rung.lag}" if self.rung.lag else "in_step"
        return "-".join(filter(None, (self.algorithm, self.task, lag, self.rung.rate, self.way, self.fault)))

    @property
    def in_step(self) -> "Cell":
        """The same with a sampler with which nothing is wrong."""
        return replace(self, rung=replace(self.rung, lag=0), fault=None)


@dataclass(frozen=True)
class Run:
    """One arm in one cell, with one seed."""

    arm: Arm
    cell: Cell
    seed: int = 0
    steps: int = STEPS

    @property
    def at(self) -> Cell:
        """Where it is run. The reference is the same for all cells of a task, trainer and rate."""
        return self.cell.in_step if self.arm.in_step else self.cell

    @property
    def name(self) -> str:
        return f"{self.at.name}-{self.arm.name}-{self.seed}"

    @property
    def sampler(self) -> dict[str, Any]:
        """What is wrong with the sampler. Some do not say how old they are, see `announces`."""
        announced = announces(self.cell.task) or self.cell.way == "announced"
        lag = {"lag": self.at.rung.lag, "announced": announced} if self.at.rung.lag else {}
        return {**lag, **FAULTS.get(self.at.fault, {})}

    @property
    def engine(self) -> str:
        """What vLLM's engine is built with: the model of the task, and how it is rounded."""
        return " ".join(filter(None, (self.cell.task, self.sampler.get("quantization"))))

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the outcome, apart from the seed. As it is read back from JSON."""
        return {
            "task": self.cell.task,
            "sampler": self.sampler,
            "learning_rate": RATES[self.cell.rung.rate],
            "algorithm": self.cell.algorithm,
            "options": self.arm.options,
            "rule": self.arm.rule,
            "trl": self.arm.trl,
            "steps": self.steps,
            **({"way": WAYS[self.cell.way]} if self.cell.way else {}),
        }


@dataclass(frozen=True)
class Setup:
    """
    What a run trains on.

    Args:
        parts (`dict`):
            Arguments of the trainer: model, reward, data, tokenizer, adapter.
        settings (`dict`):
            Fields of its configuration.
        measure (`Callable`):
            Returns the held-out accuracy of a model.
        tied (`bool`):
            Whether the model has tied embeddings.
        every (`int`, *optional*, defaults to `10`):
            Steps between two looks at held-out accuracy.
    """

    parts: dict[str, Any]
    settings: dict[str, Any]
    measure: Callable[[Any], float]
    tied: bool
    every: int = 10


# Arms -----------------------------------------------------------------------------------------------------------------

FLOOR = 0.001  # of the ratio, as in `auto`
INF = float("inf")
POSITIVE = {"": [1.0, 1.0], "to1": [0.0, 1.0], "to2": [0.0, 2.0]}  # bounds of weights of positive advantages
TV = {"": [0.2, 0.2], "tv10": [0.1, 0.1], "tv30": [0.3, 0.3], "tv10_20": [0.1, 0.2], "tv20_10": [0.2, 0.1]}


def candidate(cap: float, positive: str = "", tv: str = "", floor: bool = True) -> Arm:
    """
    A rule like `auto`. Without `tv` in its name, its trust region has a bound of 0.2.

    Args:
        cap (`float`):
            Upper bound of the weights of negative advantages.
        positive (`str`, *optional*):
            Bounds of the weights of positive ones, one of `POSITIVE`.
        tv (`str`, *optional*):
            Bounds on the change of a probability, for negative and positive advantages, one of `TV`.
        floor (`bool`, *optional*, defaults to `True`):
            Whether a token whose ratio is below `FLOOR` is rejected.
    """
    bounds: dict[str, list[float]] = {"token_tv": TV[tv], **({"token_k1": [FLOOR, INF]} if floor else {})}
    options: dict[str, Any] = {
        "rollout_is": "token",
        "rollout_is_threshold": [[0.0, float(cap)], POSITIVE[positive]],
        "rollout_is_clamp": True,
        "rollout_rs": [*bounds],
        "rollout_rs_threshold": [*bounds.values()],
    }
    name = "_".join(filter(None, (f"cap{cap:g}", positive, tv, "" if floor else "open")))
    return Arm(name, options)


CAPS = [candidate(cap) for cap in (1, 2, 3, 5, 10)]
CAP1_TV10 = candidate(1, tv="tv10")
CANDIDATES = [
    *(candidate(cap, tv="tv10") for cap in (2, 3, 5, 10)),
    *(candidate(1, tv=tv) for tv in ("", "tv30", "tv10_20", "tv20_10")),
    *(candidate(3, tv=tv) for tv in ("", "tv30")),
    *(candidate(1, positive, "tv10") for positive in ("to1", "to2")),
    candidate(1, tv="tv10", floor=False),
]
# Arms of `rules.py`. The last four are published rules that adapt themselves
RULED = (
    "ipo",
    "region",
    "wide",
    "by_age",
    "split",
    "twice",
    "excess",
    "slack",
    "quarter",
    "grown",
    "prefix",
    "recent",
    "reshape",
    "mixture",
    "m2po",
    "vexact",
)
TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate")  # its default is `sequence_mask`
ARMS = {
    arm.name: arm
    for arm in (
        Arm("on_policy", {"rollout_correction": "disabled"}, in_step=True),
        Arm("none", {"rollout_correction": "disabled"}),
        Arm("trl", trl=True),
        # The same in a trainer of the package, which can push to 8 bits
        Arm("trl_preset", {"rollout_correction": "trl"}),
        Arm("token_2", {"rollout_is": "token", "rollout_is_threshold": 2.0}),
        Arm("auto", {"rollout_correction": "auto"}),
        Arm(
            "single",
            {"rollout_correction": "auto", "rollout_is": "token", "rollout_is_threshold": [[0.0, 1.0], [1.0, 1.0]]},
        ),
        Arm("rounded", {"rollout_correction": "auto"}, past=True),  # `split` as the package had it
        # The same as `rounded`, but a token below the floor drops its whole completion
        Arm(
            "veto",
            {
                "rollout_correction": "auto",
                "rollout_rs": ["token_tv", "seq_max_k1"],
                "rollout_rs_threshold": [[0.2, 0.2], [0.001, float("inf")]],
            },
            past=True,
        ),
        Arm("icepop", {"rollout_correction": "decoupled_token_icepop"}),
        Arm("bypass", {"rollout_correction": "bypass_ppo_clip"}),
        Arm("dppo_tv", {"rollout_correction": "bypass_dppo_tv"}),
        CAP1_TV10,
        *CANDIDATES,
        *CAPS,
        Arm("cap1_tv10_bypass", {**CAP1_TV10.options, "bypass_mode": True}),
        *(Arm(f"trl_{mode}", {"vllm_importance_sampling_mode": mode}, trl=True) for mode in TRL_MODES),
        *(Arm(rule, {"rollout_is": "token", "rollout_is_threshold": 20.0}, rule) for rule in RULED),
    )
}
REFERENCES = ["on_policy", "none"]


def variant(name: str, ending: str, **options: Any) -> None:
    """Add an arm that is another one with more options."""
    ARMS[f"{name}_{ending}"] = replace(ARMS[name], name=f"{name}_{ending}", options={**ARMS[name].options, **options})


# Arms of the fourth comparison
CUT_ARMS = ["none", "trl", "token_2", "dppo_tv", "cap3"]
for _name in ("on_policy", *CUT_ARMS):
    variant(_name, "masked", mask_truncated_completions=True)  # cut completions are left out of the loss
variant("trl_preset", "token_truncate", vllm_importance_sampling_mode="token_truncate")
# `auto` without its weights, without its trust region, and without its floor
_PARTS = {"rollout_rs": ["token_tv", "token_k1"], "rollout_rs_threshold": [[0.2, 0.2], [FLOOR, INF]]}
ARMS["cap3_unweighted"] = Arm("cap3_unweighted", {"rollout_is": None, **_PARTS})
variant("cap3", "no_region", rollout_rs=["token_k1"], rollout_rs_threshold=[[FLOOR, INF]])
variant("cap3", "no_floor", rollout_rs=["token_tv"], rollout_rs_threshold=[[0.2, 0.2]])
# The band that SkyRL's recipes have, as a preset of verl with other bounds
ARMS["geo_band"] = Arm(
    "geo_band",
    {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [[0.99, 1.01]]},
)


# Cells ----------------------------------------------------------------------------------------------------------------

TUNING = ["rotate", "neighbours", "tag_reverse", "tag_shift"]
JUDGING = [
    "interleave", "differences", "unpack", "mirror", "records", "complement", "tag_even", "tag_swap", "triple",
]  # fmt: skip
TAGGED_LANGUAGE, LONG_LANGUAGE = "tagged_words", "long_sums"  # of the pretrained model, see `language.py`
THIRD_TASKS = ["rot02", "rot", "row_sums", "before", "countdowns"]
CUT_TASKS = ["paused_sort", "paused_unpack"]  # some answers are cut
TUNED_TASKS = ["merge", "tag_unzip", "totals", "folded"]  # rates are tuned
FOURTH_TASKS = [*CUT_TASKS, *TUNED_TASKS]
FIFTH_TASKS = ["zigzag", "pack"]  # new ones, for a rule that decides by itself
SIXTH_TASKS = ["tally", "tag_runs"]  # new ones, for gaps and ages that no rule was chosen by

SEVENTH_TASKS = ["ordinals", "tag_inside_out"]  # new ones, for a gap that grows by itself, and for several updates
EIGHTH_TASKS = ["to_and_fro", "tag_counts"]  # new ones, with answers of more than 30 tokens


def announces(task: str) -> bool:
    """
    Whether the samplers of a task say how old they are. In the second comparison every other one announced that it was new,
    whatever its age, and so did those of the language model.
    """
    return task not in (*TUNING[1::2], *JUDGING[1::2], TAGGED_LANGUAGE, LONG_LANGUAGE)


def runs_of(cells: Sequence[Cell], names: Sequence[str], seeds: Sequence[int] = SEEDS[:1]) -> list[Run]:
    """All arms in all cells. TRL has no correction of its own for RLOO."""
    return [
        Run(ARMS[name], cell, seed)
        for seed in seeds
        for cell in cells
        for name in names
        if cell.algorithm == "grpo" or name != "trl"
    ]


SLOW_8, FASTER_8, FASTER_32 = Rung(8, "slow"), Rung(8, "faster"), Rung(32, "faster")
FAST_3, FAST_4, FAST_8, FAST_16 = (Rung(lag, "fast") for lag in (3, 4, 8, 16))

TUNING_CELLS = [
    Cell("rotate", SLOW_8),
    Cell("tag_reverse", FAST_8),
    Cell("neighbours", FAST_4, fault="garbage"),
    Cell("neighbours", FAST_16),
    Cell("sort", FASTER_32),
    Cell("tag_shift", FASTER_8),
    Cell("sort", SLOW_8),
    Cell("tag_reverse", FAST_3),
    Cell("add", FAST_4, fault="garbage"),
    Cell("rotate", FAST_16),
    Cell("add", FASTER_32),
    Cell("tag_shift", FAST_8),
    Cell("tag_reverse", FASTER_8),
    Cell("tag_shift", FAST_3),
]


def shorter(runs: Sequence[Run]) -> list[Run]:
    """Runs of the language model, which learns in fewer steps."""
    return [replace(run, steps=40) for run in runs]


# Stages of the second comparison --------------------------------------------------------------------------------------

SHORT_LIST = ["cap1_tv10", "cap3_tv10", "cap3", "cap1", "cap5_tv10", "token_2", "dppo_tv"]
JUDGED = ["trl", "token_2", "bypass", "dppo_tv", "cap1_tv10", "cap1", "cap3"]  # `cap1` was the choice of tuning
JUDGED_ONCE = [*(f"trl_{mode}" for mode in TRL_MODES), "icepop"]  # in three cells
JUDGED_WAYS = ["token_2", "dppo_tv", "cap1_tv10", "cap1", "cap3"]  # with other ways to train
EXACT, DENSE = ["unpack", "mirror", "differences", "interleave"], ["records", "complement"]
FORMATS, GARBAGE = ["tag_even", "tag_swap"], ["records", "mirror"]


def judging_runs(seed: int) -> list[Run]:
    """All runs of a seed, with first what decides most."""
    full = [*REFERENCES, *JUDGED]
    return [
        *runs_of([Cell(task, rung) for task in FORMATS for rung in (FAST_8, FASTER_8)], full, [seed]),
        *runs_of([Cell(task, FASTER_32) for task in ("records", "unpack")], [*full, "cap1_tv10_bypass"], [seed]),
        *runs_of([Cell(task, FAST_4, fault="garbage") for task in GARBAGE], full, [seed]),
        *runs_of([Cell(task, FASTER_32) for task in (*EXACT, *DENSE)], full, [seed]),
        *runs_of([Cell("differences", FAST_8, way="several"), Cell("tag_even", FAST_8, way="several")],
                 [*REFERENCES, *JUDGED_WAYS], [seed]),
        *runs_of([Cell("mirror", FAST_8, "rloo"), Cell("tag_swap", FAST_8, "rloo")], [*REFERENCES, *JUDGED_WAYS], [seed]),
        *runs_of([Cell("unpack", FASTER_32), Cell("complement", FASTER_32), Cell("tag_even", FASTER_8)],
                 JUDGED_ONCE, [seed]),
        *runs_of([Cell("triple", FAST_16)], full, [seed]),
    ]  # fmt: skip


def second_tuning() -> list[Run]:
    """The short list in every cell, and the other candidates in the one that tells most apart."""
    others = [arm.name for arm in CANDIDATES]
    return [
        *runs_of(TUNING_CELLS, [*REFERENCES, *SHORT_LIST]),
        *runs_of([Cell("sort", FASTER_32)], [name for name in others if name not in SHORT_LIST]),
    ]


def second_judging() -> list[Run]:
    """All named arms. Seeds 1 and 2 are run where the protocol asks for them."""
    runs = [run for seed in SEEDS for run in judging_runs(seed)]
    return list({run.name: run for run in runs}.values())


def taught_language() -> list[Run]:
    """The pretrained language model, after imitation: words backwards between tags, and long sums."""
    main, *others = (
        Cell(TAGGED_LANGUAGE, FASTER_8),
        Cell(TAGGED_LANGUAGE, Rung(3, "faster")),
        Cell(LONG_LANGUAGE, FASTER_8),
    )
    return shorter([*runs_of([main], [*REFERENCES, *JUDGED], SEEDS), *runs_of(others, [*REFERENCES, "cap1"])])


def several_updates() -> list[Run]:
    """Several updates per generation, with a sampler that is at most one generation behind: at most 15 optimizer steps."""
    arms, found = ["token_2", "dppo_tv", "cap1"], []
    for task, seeds in (("tag_even", SEEDS), ("tag_swap", SEEDS[:1])):
        behind, in_step = (Cell(task, Rung(lag, "fast"), way="several") for lag in (1, 0))
        found += [*runs_of([in_step], ["on_policy", *arms], seeds), *runs_of([behind], [*REFERENCES, *arms], seeds)]
    return found


# Stages of the third comparison ---------------------------------------------------------------------------------------

DECIDING = [*REFERENCES, "cap1", "cap3", "cap10", "trl", "dppo_tv"]
OTHERS = ["cap5", "cap2", "region", "ipo", "bypass", "token_2"]
FASTER_16 = Rung(16, "faster")
THIRD_CELLS = [
    *(Cell("rot02", rung) for rung in (SLOW_8, FAST_8)),
    *(Cell("rot", rung) for rung in (SLOW_8, FAST_8)),
    *(Cell("row_sums", rung) for rung in (FASTER_8, FASTER_16, FASTER_32)),
    Cell("before", FASTER_16),
    Cell("countdowns", FAST_16),
]


def third() -> list[Run]:
    """Caps on the weights of bad tokens, where the policy moves fast."""
    return runs_of(THIRD_CELLS, [*DECIDING, *OTHERS], SEEDS)


# With a sampler of 8 bits ----------------------------------------------------------------------------------------------

ROUNDED = ["none", "trl_preset", "token_2", "dppo_tv", "cap1", "cap3"]
IN_STEP_FASTER, FASTER_4 = Rung(0, "faster"), Rung(4, "faster")
PLAIN_CELLS = [
    *(Cell(task, FASTER_4) for task in ("tag_even", "unpack")),
    Cell("rot02", FAST_4),
    *(Cell(task, IN_STEP_FASTER) for task in ("tag_even", "unpack")),
    Cell("unpack", FASTER_16),
]


def eight_bits() -> list[Run]:
    """Real weights of 8 bits in the sampler, and the same cells with bfloat16."""
    language = [Cell(TAGGED_LANGUAGE, rung) for rung in (FASTER_4, IN_STEP_FASTER)]
    whole = Cell(TAGGED_LANGUAGE, Rung(4, "slower"), fault="fp8", way="all_weights")
    behind, in_step = ([cell for cell in PLAIN_CELLS if (cell.rung.lag > 0) is old] for old in (True, False))
    return [
        *runs_of([replace(cell, fault="fp8") for cell in PLAIN_CELLS], ["on_policy", *ROUNDED], SEEDS),
        *runs_of(behind, [*REFERENCES, "cap1", "cap3"], SEEDS),
        *runs_of(in_step, ["on_policy", "cap3"], SEEDS),
        *shorter(runs_of([replace(cell, fault="fp8") for cell in language], ["on_policy", *ROUNDED], SEEDS)),
        *shorter(runs_of(language[:1], [*REFERENCES, "cap3"], SEEDS)),
        *shorter(runs_of([whole], ["on_policy", "none", "cap3"], SEEDS)),
    ]


# Stages of the fourth comparison ---------------------------------------------------------------------------------------

CUT_LAGS = [32, 8]
PRECISION_TASKS = ["sort", "triple"]
PRECISION_ARMS = ["none", "trl", "trl_token_truncate", "token_2", "cap3"]
# Added when seeds 0 and 1 were done: why does `cap3` end low?
PRECISION_PARTS = ["cap3_unweighted", "cap3_no_region", "dppo_tv"]
TUNED_RATES = ["fast", "faster", "slow"]
TUNED_ARMS = ["none", "trl", "trl_token_truncate", "dppo_tv", "geo_band", "cap3", "cap3_unweighted", "cap3_no_region"]
ROUNDED_ARMS = ["cap3", "cap1", "dppo_tv", "trl_preset", "trl_preset_token_truncate"]
FRESH_ROUNDED_ARMS = ["none", "trl_preset_token_truncate", "trl_preset", "token_2", "dppo_tv", "cap3"]


def cut_answers() -> list[Run]:
    """Answers of unequal length, of which many are cut, with cut answers in the loss and out of it."""
    arms = [name for arm in ("on_policy", *CUT_ARMS) for name in (arm, f"{arm}_masked")]
    return [
        run
        for seed in SEEDS
        for task in CUT_TASKS
        for lag in CUT_LAGS
        for run in runs_of([Cell(task, Rung(lag, "fast"))], arms, [seed])
    ]


def fresh_weights() -> list[Run]:
    """A sampler with the newest weights whose numbers are less exact, for many steps."""
    planned = [(task, ["on_policy", *PRECISION_ARMS], seed) for seed in SEEDS for task in PRECISION_TASKS]
    added = [(task, PRECISION_PARTS, seed) for seed in SEEDS for task in PRECISION_TASKS]
    return [
        replace(run, steps=LONG)
        for task, arms, seed in (*planned, *added)
        for run in runs_of([Cell(task, Rung(0, "fast"), fault="noise", way="long")], arms, [seed])
    ]


def tuned_rates() -> list[Run]:
    """Each arm at three learning rates, in new tasks, and parts of `auto` taken out; first its floor, with garbage."""
    return [
        *runs_of([Cell("mirror", FAST_4, fault="garbage")], ["none", "cap3", "cap3_no_floor"], SEEDS),
        *(
            run
            for seed in SEEDS
            for task in TUNED_TASKS
            for run in runs_of([Cell(task, Rung(8, rate)) for rate in TUNED_RATES], ["on_policy", *TUNED_ARMS], [seed])
        ),
    ]


def preset_for_8_bits() -> list[Run]:
    """The pretrained model with equal seeds, in bfloat16 and in 8 bits."""
    plain = Cell(TAGGED_LANGUAGE, FASTER_4)
    return shorter(
        [
            run
            for seed in SEEDS
            for cell in (replace(plain, fault="fp8"), plain)
            for run in runs_of([cell], ["on_policy", *ROUNDED_ARMS], [seed])
        ]
    )


def fresh_8_bits() -> list[Run]:
    """The pretrained model with fresh weights in 8 bits, its largest gap."""
    cell = Cell(TAGGED_LANGUAGE, IN_STEP_FASTER, fault="fp8")
    return shorter([run for seed in SEEDS for run in runs_of([cell], ["on_policy", *FRESH_ROUNDED_ARMS], [seed])])


# Stages of E6: one rule that decides by itself ---------------------------------------------------------------------------

# The candidates, the simplest first
CHOSEN = "rounded"  # `split` as the package had it
NEXT = "excess"  # the next candidate
ONE_RULE = ["cap3_unweighted", "wide", "by_age", "split", "excess"]
NEW_ARMS = ["none", "trl", "trl_token_truncate", "token_2", "dppo_tv", "cap3", "cap3_unweighted"]
CONTROLS = ["reshape", "mixture", "m2po", "vexact"]


def lengthened(runs: Sequence[Run]) -> list[Run]:
    """Runs with as many steps as their way to train asks for."""
    steps = {"long": LONG, "mid": MID}
    return [replace(run, steps=steps.get(run.cell.way or "", run.steps)) for run in runs]


def one_rule_tuning() -> list[Run]:
    """Candidates where weights are fresh and noisy, stale and noisy, in 8 bits, stale, or lost, and with garbage."""
    cells = [
        Cell("tag_shift", FASTER_4, fault="fp8"),
        Cell("tag_shift", FASTER_8),
        Cell("tag_reverse", FASTER_4, fault="fp8"),
        Cell("tag_reverse", FASTER_8, fault="lost"),
        Cell("sort", Rung(0, "fast"), fault="noise", way="long"),
        Cell("rotate", FAST_8, fault="noise", way="mid"),
        Cell("sort", FASTER_32),
        Cell("neighbours", FAST_4, fault="garbage"),
        Cell("tag_reverse", FASTER_8),
        Cell("tag_reverse", IN_STEP_FASTER, fault="fp8"),
        Cell("rotate", Rung(0, "fast"), fault="noise", way="long"),
    ]
    known = ["on_policy", "none", "cap3", "dppo_tv", "trl_preset", "trl_preset_token_truncate"]
    return lengthened(
        [
            run
            for seed in SEEDS
            for names in (ONE_RULE, known)
            for cell in cells
            for run in runs_of([cell], names, [seed])
        ]
    )


def one_rule_judging() -> list[Run]:
    """The chosen rule where the other arms are in the archive, and four new cells with all arms."""
    rules = [CHOSEN, NEXT, "split", "cap3_unweighted"]
    noise, fp8 = {"fault": "noise", "way": "long"}, {"fault": "fp8"}
    fresh = [Cell(task, Rung(0, "fast"), **noise) for task in PRECISION_TASKS]
    pretrained = [Cell(TAGGED_LANGUAGE, rung, **fp8) for rung in (FASTER_4, IN_STEP_FASTER)]
    stale = [
        *(Cell(task, rung) for task in FORMATS for rung in (FASTER_8, FAST_8)),
        *(Cell(task, FASTER_32) for task in (*EXACT, *DENSE)),
        *(Cell(task, FAST_4, fault="garbage") for task in GARBAGE),
        Cell("triple", FAST_16),
    ]
    rounded = [replace(cell, fault="fp8") for cell in PLAIN_CELLS]
    others = [
        *(Cell(task, Rung(lag, "fast")) for task in CUT_TASKS for lag in CUT_LAGS),
        *(Cell(task, Rung(8, rate)) for task in TUNED_TASKS for rate in TUNED_RATES),
        *(Cell(task, FAST_8, "rloo") for task in ("mirror", "tag_swap")),
        *(Cell(task, FAST_8, way="several") for task in ("differences", "tag_even")),
    ]
    new = [
        Cell(task, rung, fault="noise", way=way)
        for task in FIFTH_TASKS
        for rung, way in ((Rung(0, "fast"), "long"), (FAST_8, "mid"))
    ]
    return [
        run
        for seed in SEEDS
        for run in (
            *lengthened(runs_of(fresh, rules, [seed])),
            *shorter(
                runs_of([*pretrained, Cell(TAGGED_LANGUAGE, FASTER_4), Cell(TAGGED_LANGUAGE, FASTER_8)], rules, [seed])
            ),
            *runs_of([*stale, *rounded, *others], rules, [seed]),
            *lengthened(runs_of(new, ["on_policy", CHOSEN, NEXT, *NEW_ARMS, *CONTROLS], [seed])),
        )
    ]


def unseen() -> list[Run]:
    """E8: gaps and ages that no rule was chosen by, in two tasks that were in no comparison."""
    plain, tagged = SIXTH_TASKS
    arms = ["on_policy", *NEW_ARMS[:5], "single"]
    cells = [
        *(Cell(task, Rung(0, "fast"), fault="loud", way="mid") for task in SIXTH_TASKS),
        Cell(plain, FAST_8, fault="mixed"),
        Cell(tagged, FASTER_8, fault="mixed"),
        Cell(plain, FAST_8, fault="silent"),
        Cell(tagged, FASTER_8, fault="silent"),
        Cell(plain, Rung(16, "faster")),
        Cell(tagged, FASTER_8),
    ]
    return lengthened(
        [
            run
            for seed in SEEDS
            for cell in cells
            for run in runs_of([cell], [*arms, *(["cap1"] if cell.fault == "silent" else [])], [seed])
        ]
    )


def further() -> list[Run]:
    """E10: the two tasks of E8 with 8 bits, noise and age together, several updates, RLOO, and a high age."""
    plain, tagged = SIXTH_TASKS
    fp8 = [Cell(plain, FASTER_4, fault="fp8"), Cell(tagged, IN_STEP_FASTER, fault="fp8")]
    others = [
        Cell(plain, FAST_8, fault="noise", way="mid"),
        Cell(tagged, FAST_8, way="several"),
        Cell(plain, FAST_8, "rloo"),
        Cell(tagged, FASTER_32),
    ]
    arms = ["token_2", "dppo_tv", "single"]
    return lengthened(
        [
            run
            for seed in SEEDS
            for run in (
                *runs_of(others, [*REFERENCES, "trl", "trl_token_truncate", *arms], [seed]),
                *runs_of(fp8, [*REFERENCES, "trl_preset", "trl_preset_token_truncate", *arms], [seed]),
            )
            if run.cell.algorithm == "grpo" or not run.arm.trl
        ]
    )


def announced() -> list[Run]:
    """`single` with the pretrained model and a sampler that is old, and says so."""
    cells = [
        Cell(TAGGED_LANGUAGE, FASTER_8, way="announced"),
        Cell(TAGGED_LANGUAGE, FASTER_4, fault="fp8", way="announced"),
    ]
    return shorter([run for cell in cells for run in runs_of([cell], ["single"], SEEDS)])


def same_arms() -> list[Run]:
    """What was missing of the cells that README quotes: three seeds of the same four arms."""
    pretrained = Cell(TAGGED_LANGUAGE, FASTER_8)
    noisy = [Cell(task, Rung(0, "fast"), fault="noise", way="long") for task in PRECISION_TASKS]
    return [
        *shorter(runs_of([pretrained], ["trl_token_truncate"], SEEDS)),
        *lengthened(runs_of(noisy, ["single"], SEEDS)),
        *shorter(runs_of([replace(pretrained, rung=FASTER_4, fault="fp8")], ["none"], SEEDS)),
        *shorter(runs_of([replace(pretrained, rung=IN_STEP_FASTER, fault="fp8")], ["single"], SEEDS)),
    ]


def grown_gap() -> list[Run]:
    """E9: `single` that also asks whether the gap has grown, where the age is false, and where weights are fresh."""
    silent = [Cell(task, rung, fault="silent") for task, rung in zip(SIXTH_TASKS, (FAST_8, FASTER_8), strict=True)]
    noisy = [Cell(task, Rung(0, "fast"), fault="noise", way="long") for task in PRECISION_TASKS]
    loud = [Cell(task, Rung(0, "fast"), fault="loud", way="mid") for task in SIXTH_TASKS]
    pretrained = [
        Cell(TAGGED_LANGUAGE, FASTER_8),
        Cell(TAGGED_LANGUAGE, IN_STEP_FASTER, fault="fp8"),
        Cell(TAGGED_LANGUAGE, FASTER_4, fault="fp8"),
    ]
    lost = [Cell("tag_reverse", FASTER_8, fault="lost")]
    return [
        *lengthened(runs_of([*silent, *lost, *noisy, *loud], ["grown"], SEEDS)),
        *shorter(runs_of(pretrained, ["grown"], SEEDS)),
    ]


def grown_new() -> list[Run]:
    """E11: the same rule in two new tasks, in which the age is false, or a rounding gap grows by itself."""
    arms = ["on_policy", *NEW_ARMS[:5], "single", "grown", "cap1"]
    plain, tagged = SEVENTH_TASKS
    cells = [
        Cell(plain, FAST_8, fault="silent"),
        Cell(tagged, FASTER_8, fault="silent"),
        *(Cell(task, Rung(0, "fast"), fault="swelling", way="mid") for task in SEVENTH_TASKS),
    ]
    return lengthened([run for seed in SEEDS for cell in cells for run in runs_of([cell], arms, [seed])])


def several_again() -> list[Run]:
    """E12: several updates per generation and weights 64 steps old, where TRL's default had been better than `single`."""
    tagged, others = Cell("tag_even", FAST_8, way="several"), Cell("differences", FAST_8, way="several")
    earlier = Cell(SIXTH_TASKS[1], FAST_8, way="several")
    new = [Cell(task, FAST_8, way="several") for task in SEVENTH_TASKS]
    return [
        run
        for seed in SEEDS
        for run in (
            *runs_of([tagged, others], ["trl", "single", "prefix"], [seed]),
            *runs_of([earlier], ["prefix"], [seed]),
            *runs_of(
                new, [*REFERENCES, "trl", "trl_token_truncate", "token_2", "dppo_tv", "single", "prefix"], [seed]
            ),
        )
    ]


def recent_ratios() -> list[Run]:
    """E13: the product of the ratios of a few tokens as the weight, where `single` has weights and its age is true."""
    plain, tagged = SIXTH_TASKS
    several = [Cell(task, FAST_8, way="several") for task in ("tag_even", tagged, *SEVENTH_TASKS)]
    quoted = [Cell(plain, Rung(16, "faster")), Cell(tagged, FASTER_8)]
    pretrained = [
        Cell(TAGGED_LANGUAGE, FASTER_8, way="announced"),
        Cell(TAGGED_LANGUAGE, FASTER_4, fault="fp8", way="announced"),
    ]
    others = [
        Cell(plain, FAST_8, fault="noise", way="mid"),
        Cell(plain, FAST_8, "rloo"),
        Cell(tagged, FASTER_32),
        Cell(plain, FASTER_4, fault="fp8"),
        Cell("tag_even", FASTER_8),
        Cell("unpack", FASTER_32),
        Cell("unpack", FASTER_4, fault="fp8"),
        Cell("merge", FASTER_8),
        Cell("triple", FAST_16),
        Cell("records", FAST_4, fault="garbage"),
        Cell("countdowns", FAST_16),
    ]
    arms = ["single", "recent"]
    return [
        *lengthened(runs_of([*several, *quoted, *others], arms)),
        *shorter(runs_of(pretrained, arms)),
        *lengthened(runs_of([*several, *quoted], arms, SEEDS[1:])),
        *shorter(runs_of(pretrained, arms, SEEDS[1:])),
        *lengthened(runs_of(others, arms, SEEDS[1:])),
    ]


def young() -> list[Run]:
    """E14: ages of one and two steps, as most asynchronous runs have them."""
    plain, tagged = SIXTH_TASKS
    cells = [
        *(Cell(task, Rung(lag, "faster")) for lag in (2, 1) for task in SIXTH_TASKS),
        Cell(plain, Rung(2, "fast"), fault="noise", way="mid"),
        Cell(tagged, Rung(2, "faster"), fault="fp8"),
    ]
    arms = ["token_2", "dppo_tv", "single", "recent"]
    return lengthened(
        [
            run
            for seed in SEEDS
            for cell in cells
            for run in runs_of(
                [cell],
                [
                    *REFERENCES,
                    *(
                        ["trl_preset", "trl_preset_token_truncate"]
                        if cell.fault == "fp8"
                        else ["trl", "trl_token_truncate"]
                    ),
                    *arms,
                ],
                [seed],
            )
        ]
    )


def recent_again() -> list[Run]:
    """E15: the product of 16 ratios in two new tasks with longer answers, and where E13 has one seed or none."""
    plain, tagged = EIGHTH_TASKS
    cells = [
        Cell(plain, FASTER_32),
        Cell(tagged, FASTER_8),
        Cell(plain, FAST_8, way="several"),
        Cell(tagged, FAST_8, way="several"),
        Cell(plain, FASTER_4, fault="fp8"),
        Cell(tagged, FAST_8, fault="noise", way="mid"),
    ]
    left = [
        Cell("tag_even", FASTER_8),
        Cell("unpack", FASTER_32),
        Cell("merge", FASTER_8),
        Cell("triple", FAST_16),
        Cell("records", FAST_4, fault="garbage"),
        Cell("countdowns", FAST_16),
    ]
    pretrained = [
        Cell(TAGGED_LANGUAGE, FASTER_8, way="announced"),
        Cell(TAGGED_LANGUAGE, FASTER_4, fault="fp8", way="announced"),
    ]
    arms = ["recent", "single"]

    def others_of(cell: Cell) -> list[str]:
        presets = cell.fault == "fp8"  # TRL's own trainer cannot push to 8 bits
        trl = ["trl_preset", "trl_preset_token_truncate"] if presets else ["trl", "trl_token_truncate"]
        return [*REFERENCES, *trl, "dppo_tv"]

    return [
        *lengthened(runs_of([*cells, *left], arms)),
        *shorter(runs_of(pretrained, ["recent"], SEEDS[1:])),
        *lengthened(runs_of(cells, arms, SEEDS[1:])),
        *lengthened([run for cell in cells for run in runs_of([cell], others_of(cell))]),
        *lengthened(runs_of(left[:-1], arms, SEEDS[1:])),
        *lengthened([run for cell in cells for run in runs_of([cell], others_of(cell), SEEDS[1:])]),
    ]


STAGES = {
    stage.__name__: stage
    for stage in (
        second_tuning,
        second_judging,
        several_updates,
        taught_language,
        third,
        eight_bits,
        cut_answers,
        fresh_weights,
        tuned_rates,
        preset_for_8_bits,
        fresh_8_bits,
        one_rule_tuning,
        one_rule_judging,
        unseen,
        further,
        announced,
        same_arms,
        grown_gap,
        grown_new,
        several_again,
        recent_ratios,
        young,
        recent_again,
    )
}
