"""The exercises of 14_honest_benchmarks, the questions to ask, and six reports made from recorded runs."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlscale import honest_benchmarks as honest
from dlscale.course import records
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import intervals


def _paired(answer: Any) -> str | None:
    rng = np.random.default_rng(1001)
    for rounds in (9, 15):
        machine = rng.lognormal(0, 0.8, rounds)  # a noisy moment hits both
        theirs, ours = 3 * machine * rng.lognormal(0, 0.01, rounds), 2 * machine * rng.lognormal(0, 0.01, rounds)
        theirs[:2] *= 20  # and two hit one of them
        theirs[2 + machine[2:].argmin()] /= 3  # in the quietest round its clock stutters
        found = answer(theirs.copy(), ours.copy())
        if wrong := compare(f"The median of the gains in {rounds} rounds", found, np.median(theirs / ours), 0.03):
            return wrong
    return None


paired = Exercise(
    id="honest_benchmarks-paired",
    answer="times_faster",
    question="Two programs took turns, round by round, on a noisy machine. Write `times_faster(theirs, ours)`, from "
    "their seconds (rounds,): how many times faster ours is in the median round. A noisy moment that hits both "
    "programs of a round must not count; and hardly what hits a single program in a round or two, be it too slow or, "
    "by a stuttering clock, too fast.",
    hints=(
        "The median of theirs over the median of ours may take the two from different rounds.",
        "What drops out if you divide within a round?",
    ),
    code="""
def times_faster(theirs, ours):
    return np.median(theirs / ours)
""",
    wrong=_paired,
    right="within a round the machine's mood divides out; the median of the rounds does not mind a few bad ones.",
)


def _seeds(answer: Any) -> str | None:
    for difference, deviation in ((1.0, 1.5), (0.5, 2.0), (2.0, 2.1), (3.0, 1.2)):
        wanted = honest.seeds_needed(difference, deviation)
        found = answer(difference, deviation)
        if not np.isfinite(found) or abs(found - wanted) > max(2, 0.1 * wanted):
            told = f"for {difference:g} points and a deviation of {deviation:g}"
            return f"{told}, {found:.4g} is too {'many' if found > wanted else 'few'} (some 10 % off would do)."
    return None


seeds = Exercise(
    id="honest_benchmarks-seeds",
    answer="seeds_for",
    question="Write `seeds_for(difference, deviation)`: about how many seeds a paired comparison needs to show a "
    "difference with a power of 80 %. Within 10 %, or two seeds, of the exact number is good enough; for few seeds "
    "that by $\\Phi$ is too small by two or so, since their deviation is estimated, too.",
    hints=(
        "The mean of $n$ differences has a deviation of $\\sigma/\\sqrt n$. How many of these must the true difference "
        "lie above zero, so that four of five intervals stay clear of it?",
        "An interval reaches about 1.96 deviations to each side, and four of five draws lie above −0.84 deviations. "
        "Add two seeds for Student's $t$.",
    ),
    code="""
def seeds_for(difference, deviation):
    return math.ceil(((1.96 + 0.84) * deviation / difference) ** 2) + 2
""",
    wrong=_seeds,
    right="half the difference costs four times the seeds.",
)


def _survival(answer: Any) -> str | None:
    rng, cases = np.random.default_rng(1002), []
    cases.append((np.array([3.0, 5.0, 5.0, 8.0]), np.array([True, True, True, True])))
    cases.append((np.array([2.0, 4.0, 4.0, 6.0, 9.0]), np.array([True, False, True, True, False])))
    for size in (12, 30):
        cases.append((rng.integers(1, 15, size).astype(float), rng.random(size) < 0.6))
    for times, reached in cases:
        wanted = honest.survival(times, reached)
        found_times, found = answer(times.copy(), reached.copy())
        if wrong := compare("The times at which some arrive", found_times, wanted.times, 1e-9):
            return wrong
        if wrong := compare("The share that still waits", found, wanted.waiting, 1e-6):
            return f"{wrong} ({len(times)} runs, {np.count_nonzero(~reached)} given up.)"
    return None


survival = Exercise(
    id="honest_benchmarks-survival",
    answer="still_waiting",
    question="Write `still_waiting(times, reached)`, Kaplan and Meier's estimate. `times` (runs,) says until when each "
    "run was watched, `reached` whether it got there then, or was given up. Return the times at which some arrive, "
    "each once and in order, and the share that still waits from each of them on.",
    hints=(
        "For one time of arrival: how many were still watched just before, and how many of these arrive?",
        "A run that was given up at 4 was still watched at 4. Multiply the shares that stay, from the first on.",
    ),
    code="""
def still_waiting(times, reached):
    at, share, waiting = np.unique(times[reached]), 1.0, []
    for now in at:
        watched = np.count_nonzero(times >= now)
        arrive = np.count_nonzero(reached & (times == now))
        share = share * (1 - arrive / watched)
        waiting.append(share)
    return at, np.array(waiting)
""",
    wrong=_survival,
    right="who was given up counts as long as it was watched: neither dropped nor called a success.",
)


def course_of_a_run(seed: int, below: float | None = None, looks: int = 400) -> tuple[np.ndarray, ...]:
    """Times, what a run's accuracy would be without noise, and what was seen: noise that lasts a few looks.

    Each run rises at its own speed, to a best of its own: 1 to 3 points above the target, or `below` it.
    """
    rng, times = np.random.default_rng(seed), np.arange(1, looks + 1, dtype=float)
    best = TARGET + (rng.uniform(1, 3) if below is None else -below)
    truth = best - (best - 10) * np.exp(-times / (looks * rng.uniform(0.08, 0.24)))
    each = np.zeros(looks)
    for i in range(1, looks):
        each[i] = 0.5 * each[i - 1] + rng.normal() * 1.6 * np.sqrt(0.75)
    return times, truth, truth + each


TARGET, RUNS = 57.0, 40


def _robust(answer: Any) -> str | None:
    off, moved, never = [], [], 0
    for seed in range(2000, 2000 + RUNS):
        times, truth, seen = course_of_a_run(seed)
        true = float(honest.first_crossing(times, truth, TARGET))
        when, seldom = (
            min(float(answer(times[k::4].copy(), seen[k::4].copy(), TARGET)), 2 * times[-1]) if k else
            min(float(answer(times.copy(), seen.copy(), TARGET)), 2 * times[-1]) for k in (0, 3)
        )  # fmt: skip
        off.append(abs(when - true))
        moved.append(seldom - when)
        times, _, seen = course_of_a_run(seed, below=1.0)
        never += np.isinf(float(answer(times, seen, TARGET)))
    if not np.mean(off) <= OFF:
        return f"over {RUNS} runs it is {np.mean(off):.0f} of 400 looks off on average; at most {OFF} are asked for."
    if not abs(np.mean(moved)) <= MOVED:
        told = f"with every fourth look only, it comes {np.mean(moved):.0f} looks later on average"
        return f"{told}; at most {MOVED}, earlier or later, are asked for."
    if never < 0.9 * RUNS:
        told = f"{RUNS - never} of {RUNS} runs whose accuracy comes to rest a point below the target"
        return f"it says of {told} that they got there; at most {RUNS // 10} is asked for."
    return None


OFF, MOVED = 30, 12

robust = Exercise(
    id="honest_benchmarks-robust",
    answer="reached_at",
    question="**Open.** Write `reached_at(times, accuracy, target)`: when a run reached the target, `math.inf` if "
    "never, in a way that looking often does not help. It is tried on forty runs whose accuracy without noise is known "
    f"(`exercises.course_of_a_run(seed)`): on average at most {OFF} of 400 looks off; at most {MOVED} earlier or later "
    "if only every fourth look is given; and at most one in ten runs that come to rest a point below the target may be "
    "said to have reached it.",
    hints=(
        "One look is one draw. How would you tell the run's accuracy at a time better than by one look?",
        "The mean over a stretch of time has much less noise, and belongs to the middle of the stretch. How many looks "
        "lie in it follows from `times`.",
    ),
    code="""
def reached_at(times, accuracy, target):
    width = max(1, round(50 / (times[1] - times[0])))
    smooth = np.convolve(accuracy, np.ones(width) / width, mode="valid")
    there = smooth >= target
    return times[there.argmax() + width // 2] if there.any() else math.inf
""",
    wrong=_robust,
    right="a time to accuracy needs an accuracy that one lucky look cannot give.",
)


TARGETS = tuple(np.arange(40.0, 61.0, 2.0).tolist())


def two_systems(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times, and accuracies (runs, looks) of ours and of theirs: one may be quicker, the other come further."""
    rng, times = np.random.default_rng(seed), np.arange(1.0, 61.0)
    rise = lambda best, tau: best - (best - 10) * np.exp(-times / tau)  # noqa: E731
    curves = [rise(rng.uniform(50, 60), rng.uniform(6, 16)) + rng.normal(0, 0.7, (9, 60)) for _ in range(2)]
    return times, curves[0], curves[1]


def gains(times: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> dict[float, float]:
    """How many times sooner ours looks at each target that most of ours reach."""
    found = {}
    for target in TARGETS:
        mine, other = (honest.median(honest.first_crossing(times, runs, target)) for runs in (ours, theirs))
        if np.isfinite(mine):
            found[target] = float(other / mine)
    return found


def _threshold(answer: Any) -> str | None:
    for seed in range(3000, 3012):
        times, ours, theirs = two_systems(seed)
        found, looks = answer(times, ours.copy(), theirs.copy(), TARGETS), gains(times, ours, theirs)
        if found not in looks:
            return f"for case {seed} the target {found!r} is none that most of our runs reach."
        if looks[found] < max(looks.values()):
            told = f"at {found:g} % ours looks {looks[found]:.2f} times as fast"
            return f"for case {seed} there is a better target: {told}, elsewhere {max(looks.values()):.2f} times."
    return None


threshold = Exercise(
    id="honest_benchmarks-threshold",
    answer="best_threshold",
    question="Commit one yourself. Write `best_threshold(times, ours, theirs, targets)`: the target at which ours "
    "looks best, by the ratio of the median times of the first crossing. Accuracies are (runs, looks). A target that "
    "half of our runs or more never reach does not count; one that theirs never reach is best of all.",
    hints=(
        "`honest.median(honest.first_crossing(times, ours, target))` is the median time, infinite where it must be.",
        "Infinite by finite is infinite: no special case is needed, if targets that ours never reach are left out.",
    ),
    code="""
def best_threshold(times, ours, theirs, targets):
    best, most = None, 0.0
    for target in targets:
        mine, other = (honest.median(honest.first_crossing(times, runs, target)) for runs in (ours, theirs))
        if math.isfinite(mine) and other / mine > most:
            best, most = target, other / mine
    return best
""",
    wrong=_threshold,
    right="from the same runs, whoever may choose the threshold afterwards wins more often than at one named before.",
)


# What to ask

QUESTIONS = {  # of the eighteen ways, the question that uncovers it; H: Hoefler's twelve, P: Pedram's six
    "ignore accuracy": "What accuracy does it reach at this scale?",
    "training accuracy": "On which examples is the accuracy measured?",
    "hide the tuning": "How many runs were made to find the settings, and what did they cost?",
    "old hardware": "What is the other one's hardware, and how fast is yours without your idea?",
    "only a kernel": "What share of the whole time is it, and how long does the whole take?",
    "no reading": "From where to where does the clock run? Is reading the data inside?",
    "highest ops": "What is one operation here, and how many are needed to get there?",
    "options A and B": "Were speed and accuracy measured in the same run?",
    "large inputs": "Would anybody choose this size, and is it more accurate for it?",
    "the right time": "How long until the same accuracy, instead of how much work in the same time?",
    "weak for strong": "Does the batch grow with the machine? How large is it, and what accuracy is left?",
    "choose the metric": "And by the other metric?",
    "choose the threshold": "How does it look a little below and above this threshold?",
    "best of 20": "How many times was it measured, and what is the median?",
    "per metric of advantage": "What is it before dividing? Would ten of them do ten times as much?",
    "huge search": "On which data were the settings chosen, and how is it on data that nobody has looked at?",
    "lucky seed": "How many seeds, and where do the others lie?",
    "first crossing": "How often was looked, and does it stay above?",
    "cut axes": "Where does the axis begin, and is it straight?",
}
NAMES = ("honest", *QUESTIONS)


@dataclass(frozen=True)
class Report:
    """A report on real runs: what it says, its bars with half-widths of intervals where it gives any, its axis; and
    what its author answers when asked one of the `QUESTIONS`."""

    text: str
    unit: str
    bars: dict[str, float]
    errors: dict[str, float]
    answers: dict[str, str]

    def ask(self, name: str) -> str:
        """The author's answer to the question that would uncover this way to mislead."""
        return self.answers.get(name, "It does not touch this report.")


def _half(samples: np.ndarray) -> float:
    found = intervals.interval(samples)
    return float(found.high - found.mean)


def _arms(record: str, **setting: Any) -> Any:
    kept = records.read(record)
    return lambda measure="accuracy", **own: kept.values(measure, judged_on="test", **setting, **own)


def _common(record: str, *arms: dict[str, Any], more: str = "") -> dict[str, str]:
    """What the author of an honest comparison can answer, counted in the record; each arm by its setting."""
    kept = records.read(record)
    (seeds,) = {len(kept.select(judged_on="test", **arm)) for arm in arms}
    free = [{name: value for name, value in arm.items() if name != "learning_rate"} for arm in arms]
    tried = [kept.select(judged_on="validation", **arm) for arm in free]
    rates = set.intersection(*({trial.setting["learning_rate"] for trial in trials} for trials in tried))
    (tuning,) = {sum(trial.setting["learning_rate"] == rate for trial in trials) for trials in tried for rate in rates}
    return {
        "lucky seed": f"{seeds} seeds of each; the bars are means, with 95 % intervals.",
        "best of 20": f"Every run that was made for the comparison is in it: {seeds} of each.",
        "hide the tuning": f"Each was tuned on the same {len(rates)} rates, with {tuning} seeds each.{more}",
        "huge search": "The rates were chosen on held-out examples, not on these.",
        "training accuracy": "On the test set.",
        "cut axes": "It begins at zero and is straight.",
    }


def reports() -> list[Report]:
    """Six reports, made from recorded runs of notebooks 4, 6, 10, 11 and this one."""
    bits, spectrum = _arms("gradient_compression-bits", dataset="mnist1d"), _arms("consistency-spectrum", each=1)
    sgd, ways = _arms("batch_size_and_lars-sgd", warm_up=0, epochs=256), _arms("sparsity-ways")
    arms = [{"dataset": "mnist1d", "arm": arm} for arm in ("dense", "1-bit, feedback", "top 1 %, feedback")]
    dense, one_bit, few = (bits(arm=arm["arm"]) for arm in arms)
    held_out = records.read("gradient_compression-bits").values
    edge, past = (held_out("accuracy", judged_on="validation", learning_rate=r, **arms[2]).mean() for r in (1.0, 2.0))
    numbers = sum(inputs * outputs + outputs for inputs, outputs in itertools.pairwise((40, 64, 64, 10)))
    slow = {"scenario": "one four times slower", "learning_rate": 0.8}
    waits, gossip = (spectrum("seconds", arm=arm, **slow) for arm in ("synchronous", "gossip"))
    reach = [spectrum(arm=arm, **slow) for arm in ("synchronous", "gossip")]
    other = spectrum("seconds", arm="gossip", **slow | {"learning_rate": 1.6})
    batches = [{"batch_size": 32, "learning_rate": 1.0}, {"batch_size": 128, "learning_rate": 2.0}]
    small, large = (sgd("train_accuracy", **batch) for batch in batches)
    small_test, large_test = (sgd(**batch) for batch in batches)
    gradual = {"way": "gradually", "allocation": "global"}
    whole, thick, thin = ways(way="not at all"), ways(density=0.1, **gradual), ways(density=0.01, **gradual)
    kept = records.read("honest_benchmarks-race")
    often, seldom = (_first(kept, "4 workers", every) for every in (1, 6))
    near = {t: [honest.median(_first(kept, "4 workers", every, t)) for every in (1, 6)] for t in (52.0, 53.0, 55.0)}
    return [
        Report(
            f"One bit a number. With error feedback, one-bit gradients reach {one_bit.max():.1f} %; sending everything "
            f"reaches {dense.mean():.1f} %.",
            "test accuracy, %",
            {"everything": dense.mean(), "one bit (ours)": one_bit.max()},
            {},
            _common("gradient_compression-bits", *arms[:2]) | {
                "lucky seed": f"Ten seeds of each. Ours lie between {one_bit.min():.1f} and {one_bit.max():.1f} %.",
                "best of 20": f"Ten times each. The medians are {np.median(dense):.1f} and {np.median(one_bit):.1f} %.",
            },
        ),
        Report(
            f"Fifty times fewer bytes. Sending the largest 1 % of entries, with a memory for the rest, reaches "
            f"{few.mean():.1f} %; sending everything {dense.mean():.1f} %: no difference is seen.",
            "test accuracy, %",
            {"everything": dense.mean(), "largest 1 % (ours)": few.mean()},
            {"everything": _half(dense), "largest 1 % (ours)": _half(few)},
            _common(
                "gradient_compression-bits", arms[0], arms[2],
                more=f" Ours was best at the largest, so twice that was tried: {past:.0f} % instead of {edge:.0f}.",
            ) | {
                "options A and B": f"Yes: bytes and accuracy are of the same {len(few)} runs.",
                "per metric of advantage": f"Nothing is divided: {8 * (numbers // 100):,} bytes (numbers and places) "
                f"instead of {4 * numbers:,} a message.",
                "choose the metric": f"The difference in accuracy is {intervals.interval(few - dense)} points.",
            },
        ),
        Report(
            f"A hundred times smaller. Our network of 1 % of the weights fits the smallest chips; its family comes to "
            f"{thick.mean():.1f} % on MNIST.",
            "test accuracy, %",
            {"dense": whole.mean(), "pruned (ours)": thick.mean()},
            {"dense": _half(whole), "pruned (ours)": _half(thick)},
            _common("sparsity-ways", {"way": "not at all"}, {"density": 0.1, **gradual}) | {
                "options A and B": f"The size is that of 1 % of the weights, which reach {thin.mean():.1f} %; the "
                "accuracy that of 10 %.",
                "ignore accuracy": f"{thick.mean():.1f} %, as the figure says, by the network with 10 % of them.",
            },
        ),
        Report(
            f"Waiting costs. With one of eight workers four times slower, gossip is there after {gossip.mean():.0f} "
            f"seconds of the simulated machine, synchronous training after {waits.mean():.0f}.",
            "seconds to 50 % accuracy",
            {"synchronous": waits.mean(), "gossip (ours)": gossip.mean()},
            {"synchronous": _half(waits), "gossip (ours)": _half(gossip)},
            _common("consistency-spectrum", *({"arm": arm, "each": 1} | slow for arm in ("synchronous", "gossip"))) | {
                "best of 20": f"{len(gossip)} runs of each. Another {len(other)} of gossip are not shown, at the rate "
                f"that is best by accuracy in equal time: {other.mean():.0f} seconds.",
                "choose the metric": f"Accuracy at the end: {reach[0].mean():.1f} and {reach[1].mean():.1f} %.",
                "ignore accuracy": f"Both reach it in all {len(gossip)} runs.",
                "old hardware": "The same simulated workers, the same slow one among them.",
                "choose the threshold": "It was the same for all, and is far below what both reach.",
                "first crossing": "After each 400 gradients, for both, and the first look at 50 % or above counts. At "
                f"the end all runs lie at {min(r.min() for r in reach):.1f} % or above.",
            },
        ),
        Report(
            f"Large batches learn more. Batch 128 comes to {large.mean():.1f} %, batch 32 to {small.mean():.1f} %.",
            "accuracy, %",
            {"batch 32": small.mean(), "batch 128 (ours)": large.mean()},
            {"batch 32": _half(small), "batch 128 (ours)": _half(large)},
            _common("batch_size_and_lars-sgd", *({"warm_up": 0, "epochs": 256} | batch for batch in batches)) | {
                "training accuracy": f"On the training set. On the test set: batch 128 {large_test.mean():.1f} %, "
                f"batch 32 {small_test.mean():.1f} %.",
                "the right time": "Both had 256 epochs.",
            },
        ),
        Report(
            f"Sooner there. With our scheduler four workers reach 54 % after {honest.median(often):.0f} thousand "
            f"examples, before after {honest.median(seldom):.0f} thousand.",
            "thousand examples to 54 %",
            {"before": float(honest.median(seldom)), "with our scheduler": float(honest.median(often))},
            {},
            _common("honest_benchmarks-race", {"system": "4 workers"}) | {
                "lucky seed": f"The same {len(often)} seeds before and now; the bars are medians.",
                "best of 20": f"Each run counts: the same {len(often)} seeds before and now.",
                "first crossing": "Before, we looked after every 9,216 examples; now after every 1,536. It may fall "
                "below again.",
                "choose the threshold": "; ".join(f"at {t:g} % after {a:.0f} thousand instead of {b:.0f}"
                                                  for t, (a, b) in near.items()).capitalize() + ".",
                "only a kernel": "Examples until then are all that training needs.",
            },
        ),
    ]  # fmt: skip


def _first(kept: records.Record, system: str, every: int, target: float = 54.0) -> np.ndarray:
    """Thousands of examples until the first look, of each so many, at or above the target."""
    looks = len([name for name in kept.trials[0].measures if name.startswith("test ")])
    seen = np.stack([kept.values(f"test {i}", system=system, judged_on="test") for i in range(looks)], 1)
    times = 1.536 * np.arange(1, looks + 1)
    return honest.first_crossing(times[every - 1 :: every], seen[:, every - 1 :: every], target)


ACCEPTED = [{"lucky seed", "best of 20"}, {"honest"}, {"options A and B"}, {"honest"}, {"training accuracy"}]
ACCEPTED += [{"first crossing"}]


def _detective(answer: Any) -> str | None:
    if not isinstance(answer, list | tuple) or len(answer) != len(ACCEPTED):
        return f"give a list of {len(ACCEPTED)} names, one for each report."
    if unknown := [name for name in answer if name not in NAMES]:
        return f"{unknown[0]!r} is not among the names: {', '.join(NAMES)}."
    right = sum(name in accepted for name, accepted in zip(answer, ACCEPTED, strict=True))
    if right < len(ACCEPTED):
        honest_ones = sum(accepted == {"honest"} for accepted in ACCEPTED)
        return f"{right} of {len(ACCEPTED)} reports are named rightly; {honest_ones} of them are honest."
    return None


detective = Exercise(
    id="honest_benchmarks-detective",
    answer="verdicts",
    question="Name each report's trick, or call it honest: `verdicts` is a list of six names from `exercises.NAMES`. "
    "Ask first: the menus above give the authors' answers.",
    hints=(
        "Two are honest. Suspicious is what has no interval; but two reports with intervals mislead as well.",
        "For each report ask what its figure leaves out: whose seeds, which examples, the same run, how often looked.",
    ),
    code="""
verdicts = ["lucky seed", "honest", "options A and B", "honest", "training accuracy", "first crossing"]
""",
    wrong=_detective,
    right="one good question uncovers each; and a report that can answer all of them may be believed.",
)

__all__ = ["NAMES", "QUESTIONS", "Exercise", "Report", "detective", "gains", "math", "paired", "reports", "robust",
           "seeds", "survival", "threshold", "two_systems"]  # fmt: skip
