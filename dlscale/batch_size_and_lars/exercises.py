"""The exercises of 04_batch_size_and_lars."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dlscale.batch_size_and_lars import experiment
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import devices


def _waste(answer: Any) -> str | None:
    for critical, extra in ((160, 0.2), (2000, 1.0), (64, 0.05)):
        what = f"The batch for a critical batch of {critical} and {extra:g} times more examples"
        if wrong := compare(what, answer(critical, extra), critical * extra):
            return wrong
    return None


waste = Exercise(
    id="batch_size_and_lars-waste",
    answer="largest_batch",
    question="A run may use a fraction `waste` more examples than the fewest possible: 0.2 allows a fifth more. "
    "Write `largest_batch`, the largest batch size that keeps to it, for a critical batch `critical`. (A real number "
    "will do.)",
    hints=(
        "The examples are E(B) = E_min (1 + B / B_c). By how much is that more than E_min, as a fraction of E_min?",
        "Set B / B_c equal to `waste`.",
    ),
    code="""
def largest_batch(critical, waste):
    return waste * critical
""",
    wrong=_waste,
    right="what the batch is as a fraction of the critical one, it costs as a fraction in extra examples.",
)


def _noise(answer: Any) -> str | None:
    for seed, (steps, workers, n, b) in enumerate(((40, 4, 30, 8), (7, 2, 100, 1), (200, 16, 5, 64))):
        rng = np.random.default_rng(seed)
        signals = rng.normal(size=(steps, 1, n))
        gradients = signals * rng.uniform(0.1, 2, (steps, 1, 1)) + rng.normal(size=(steps, workers, n))
        small, large = (gradients**2).sum(-1).mean(), (gradients.mean(1) ** 2).sum(-1).mean()
        noise = (small - large) / (1 / b - 1 / (workers * b))
        what = f"The noise scale from {steps} steps of {workers} workers with {b} examples each"
        if wrong := compare(what, answer(gradients, b), noise / (large - noise / (workers * b))):
            return wrong
    return None


noise = Exercise(
    id="batch_size_and_lars-noise",
    answer="noise_scale",
    question="A cluster watches its own noise scale. Over some steps it has kept the gradient of each worker, an array "
    "`gradients` (steps, workers, weights); each worker has `b` examples a step. Write `noise_scale`: from the mean "
    "squared norm of a worker's gradient and that of the mean over the workers, find signal and noise, averaged over "
    "the steps *before* you divide.",
    hints=(
        "Two batch sizes: a worker has b examples, all of them have workers · b. Take the mean squared norm at both.",
        "Two equations, small = signal + noise / b and large = signal + noise / (workers · b), and two unknowns.",
        "Subtract them: small - large = noise (1 / b - 1 / B). The signal is then large - noise / B.",
    ),
    code="""
def noise_scale(gradients, b):
    steps, workers, weights = gradients.shape
    B = workers * b
    small = (gradients**2).sum(-1).mean()
    large = (gradients.mean(1) ** 2).sum(-1).mean()
    noise = (small - large) / (1 / b - 1 / B)
    signal = large - noise / B
    return noise / signal
""",
    wrong=_noise,
    right="any data-parallel run can watch its own noise scale, at no cost but two norms.",
)


def _rate_for(answer: Any) -> str | None:
    for critical, batch, rate, other in ((160, 8, 0.1, 64), (2000, 256, 0.5, 8192), (50, 1024, 2.0, 16)):
        what = f"The best rate at batch {other} for a critical batch of {critical} and rate {rate:g} at batch {batch}"
        expected = rate * (1 + critical / batch) / (1 + critical / other)
        if wrong := compare(what, answer(other, critical, batch, rate), expected):
            return wrong
    return None


rate_for = Exercise(
    id="batch_size_and_lars-rate_for",
    answer="rate_for",
    question="You know the critical batch `critical` and the best rate `rate` at one batch size `batch`. Write "
    "`rate_for`, the rate to be tried at the batch size `other`.",
    hints=(
        "ε(B) = ε_max / (1 + B_c / B). The known pair gives ε_max.",
        "ε_max = rate · (1 + critical / batch). Divide it by what belongs to the other batch.",
    ),
    code="""
def rate_for(other, critical, batch, rate):
    return rate * (1 + critical / batch) / (1 + critical / other)
""",
    wrong=_rate_for,
    right="far below the critical batch it is the linear rule, far above it hardly moves.",
)


MOST_UPDATES, PLAN_SEEDS = 300, range(600, 616)
DECAY = [(8, 32, 0.5, 0.0), (4, 32, 0.125, 0.0), (4, 32, 0.03125, 0.0)]


def plan_result(stages: Any) -> tuple[int, np.ndarray]:
    """Updates, and test accuracies in percent (seeds,), of stages (epochs, batch, rate, momentum) on fresh seeds."""
    signals = experiment.fresh_signals("test")
    examples = (signals.x_train, signals.y_train)
    counts = [int(epochs * len(signals.x_train)) // batch for epochs, batch, _, _ in stages]

    def run(seed: int) -> float:
        state, cards = experiment.at_rest(seed), experiment.deck(seed, 16, len(signals.x_train))
        for count, (_, batch, rate, momentum) in zip(counts, stages, strict=True):
            rows, cards = cards[: count * batch].reshape(count, batch), cards[count * batch :]
            rates = np.full(count, rate, np.float32)
            state, _ = experiment.descend(state, rows, rates, np.float32(momentum), *examples)
        return experiment.percent_right(state[0], signals.x_test, signals.y_test)

    return sum(counts), np.array(devices.side_by_side(run, [(seed,) for seed in PLAN_SEEDS]))


@functools.cache
def _decayed() -> np.ndarray:
    return plan_result(DECAY)[1]


def _plan(answer: Any) -> str | None:
    stages = [tuple(stage) for stage in answer]
    if not stages or any(len(stage) != 4 for stage in stages):
        return "A plan is a list of stages (epochs, batch, rate, momentum)."
    stages = [(float(epochs), int(batch), float(rate), float(momentum)) for epochs, batch, rate, momentum in stages]
    if sum(epochs for epochs, *_ in stages) > 16 or any(epochs <= 0 for epochs, *_ in stages):
        return "The stages must last more than no epoch each, and 16 epochs altogether at most."
    if any(not 1 <= batch <= 3000 or not 0 <= momentum < 1 or rate <= 0 for _, batch, rate, momentum in stages):
        return "Batches must be from 1 to 3,000, rates above 0, and momentum from 0 to below 1."
    updates, accuracy = plan_result(stages)
    lead = float((accuracy - _decayed()).mean())
    what = f"{updates} updates, {lead:+.1f} points from decaying the rate, on fresh seeds"
    if not lead >= -1:
        return f"{what}: more than a point lower."
    if updates > MOST_UPDATES:
        return f"{what}: that can be had in at most {MOST_UPDATES} updates."
    print(what)  # the question is open: fewer may do
    return None


plan = Exercise(
    id="batch_size_and_lars-plan",
    answer="my_plan",
    question="Reach, within a point, what *decay the rate* reaches, in as few updates as you can: 300 are enough, can "
    "you do with fewer? Write `my_plan`, a list of stages (epochs, batch, rate, momentum), of 16 epochs altogether at "
    "most. It is trained on sixteen fresh seeds.",
    hints=(
        "What lets the batch be larger from the beginning? Look at the last of the four plans.",
        "Momentum 0.75 pays for four times the batch at the same rate. It costs a little: stay longer in the first "
        "stage, at batch 128, and grow the batch only once.",
    ),
    code="my_plan = [(11, 128, 0.5, 0.75), (5, 512, 0.5, 0.75)]",
    wrong=_plan,
    right="on a machine where a large step takes no longer than a small one, that is the time saved.",
)


def _best(answer: Any) -> str | None:
    for critical, overhead, per_example in ((160, 1e-3, 1e-4), (1000, 0.02, 1e-3), (50, 0.5, 0.5)):
        batches = np.geomspace(0.1, 1e6, 200_001)
        soonest = batches[np.argmin((1 + critical / batches) * (overhead + batches * per_example))]
        given = f"critical batch {critical}, overhead {overhead:g} s and {per_example:g} s for each example"
        if wrong := compare(f"The batch for {given}", answer(critical, overhead, per_example), soonest, tolerance=1e-3):
            return wrong
    return None


best = Exercise(
    id="batch_size_and_lars-best",
    answer="best_batch",
    question="On one worker a step takes `overhead` seconds and `per_example` seconds for each example. Find the batch "
    r"that reaches the target soonest, for steps $S = S_\text{min}(1 + B_c/B)$, and write it as a formula. (Multiply "
    "out; two of the four terms depend on $B$. A real number will do.)",
    hints=(
        "The time is S_min (overhead + B_c · per_example + B · per_example + B_c · overhead / B).",
        "The last two terms pull in opposite ways; their sum is least where they are equal.",
    ),
    code="""
def best_batch(critical, overhead, per_example):
    return np.sqrt(critical * overhead / per_example)
""",
    wrong=_best,
    right="it is the geometric mean of B_c and of the examples that one overhead is worth.",
)


def _step(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for what, rate, coefficient, decay, beta in (
        ("as given", 1.0, 0.01, 5e-4, 0.9),
        ("with a strong decay", 0.3, 0.05, 0.5, 0.5),
        ("without decay", 2.0, 0.01, 0.0, 0.8),
    ):
        ours = [jnp.float32(w) for w in (rng.normal(size=(5, 4)), np.zeros(4), 3 * rng.normal(size=(3, 2, 2)))]
        library = optax.lars(rate, decay, trust_coefficient=coefficient, momentum=beta)
        update = jax.jit(library.update)  # else each of its operations is compiled alone
        momenta, state, theirs = [jnp.zeros_like(w) for w in ours], library.init(ours), ours
        for count, length in enumerate((1.0, 0.01, 30.0, 0.0, 1.0), 1):
            gradients = [jnp.float32(length * rng.normal(size=w.shape)) for w in theirs]
            updates, state = update(gradients, state, theirs)
            theirs = optax.apply_updates(theirs, updates)
            ours, momenta = answer(list(ours), list(momenta), gradients, rate, coefficient, decay, beta)
            if len(ours) != 3 or len(momenta) != 3:
                return "There must be new weights and a new momentum for each of the three tensors."
            for mine, right in zip(ours, theirs, strict=True):
                if wrong := compare(f"{what}, step {count}: the tensor of shape {right.shape}", mine, right, 1e-3):
                    return wrong
    return None


step = Exercise(
    id="batch_size_and_lars-step",
    answer="lars_steps",
    question="Write it for a whole net: `lars_steps` gets lists with one array for each tensor (weights, momenta $m$, "
    "gradients) and returns the new weights and the new momenta, as two lists. Norms as in the library, and the ratio "
    "1 where one of the two norms is zero.",
    hints=(
        "A loop over zip(weights, momenta, gradients); each tensor has its own ratio, from its own norms.",
        "First d = g + decay · w, then the ratio from the norms of w and of d, then the momentum, then w minus it.",
    ),
    code="""
def lars_steps(weights, momenta, gradients, rate=1.0, coefficient=0.01, decay=5e-4, beta=0.9):
    new_weights, new_momenta = [], []
    for w, m, g in zip(weights, momenta, gradients):
        d = g + decay * w
        w_norm, d_norm = jnp.sqrt(jnp.sum(w**2)), jnp.sqrt(jnp.sum(d**2))
        ratio = coefficient * w_norm / d_norm if w_norm > 0 and d_norm > 0 else 1.0
        m = beta * m + rate * ratio * d
        new_weights.append(w - m)
        new_momenta.append(m)
    return new_weights, new_momenta
""",
    wrong=_step,
    right="for five steps, with other rates and decays too, these are the steps of optax.",
)


def _overflow(answer: Any) -> str | None:
    if answer == 65504 // 2 + 1:
        return "With one output fewer the sum is 65,504; with this one it is 65,506."
    return compare("The number of outputs", answer, 65504 // 2, tolerance=1e-6)


overflow = Exercise(
    id="batch_size_and_lars-overflow",
    answer="largest_outputs",
    question="And the weights? A dense layer before a ReLU starts with weights of variance $2/n$, where $n$ is its "
    r"number of inputs. What is the largest number of outputs for which its expected $\lVert w\rVert^2$ is still at "
    "most 65,504?",
    hints=(
        "How many weights has a layer with n inputs and k outputs? Each adds its variance to the expected sum.",
        "The number of inputs cancels.",
    ),
    code="largest_outputs = 65504 // 2",
    wrong=_overflow,
    right="at the start weights overflow only where there are very many outputs; scaled gradients do so early.",
)
