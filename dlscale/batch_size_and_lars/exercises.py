"""The exercises of 04_batch_size_and_lars ."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


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
    "Write `largest_batch`, the largest batch size that keeps to it, for a critical batch `critical`.",
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
    for signal, noise, b, B in ((0.5, 80.0, 8, 128), (2.0, 3.0, 1, 16), (0.01, 50.0, 64, 1024)):
        small, large = signal + noise / b, signal + noise / B
        if wrong := compare(f"The noise scale from batches of {b} and {B}", answer(b, B, small, large), noise / signal):
            return wrong
    return None


noise = Exercise(
    id="batch_size_and_lars-noise",
    answer="noise_scale",
    question="A cluster has some workers. The squared norm of a worker's gradient, of `b` examples, is on average "
    "`small`; that of the mean over all workers, of `B` examples in all, is on average `large`. Write `noise_scale`.",
    hints=(
        "Two equations, small = signal + noise / b and large = signal + noise / B, and two unknowns.",
        "Subtract them: small - large = noise (1 / b - 1 / B). The signal is then large - noise / B.",
    ),
    code="""
def noise_scale(b, B, small, large):
    noise = (small - large) / (1 / b - 1 / B)
    signal = large - noise / B
    return noise / signal
""",
    wrong=_noise,
    right="any data-parallel run can watch its own noise scale, at no cost but two norms.",
)


def _updates(answer: Any) -> str | None:
    return compare("The fraction", answer, (30 + 30 / 10 + 20 / 100 + 10 / 1000) / 90, tolerance=5e-3)


updates = Exercise(
    id="batch_size_and_lars-updates",
    answer="remaining",
    question="ResNet-50 is often trained for 90 epochs, with the rate divided by ten after epochs 30, 60 and 80. Let "
    "the batch grow tenfold each time instead. Which fraction of the updates `remaining` is left?",
    hints=(
        "With a batch ten times as large, an epoch has a tenth of the updates.",
        "The four parts last 30, 30, 20 and 10 epochs. Count the updates of each, in epochs of the first batch.",
    ),
    code="remaining = (30 / 1 + 30 / 10 + 20 / 100 + 10 / 1000) / 90",
    wrong=_updates,
    right="the first part is nearly all that is left, so a larger batch to begin with is worth most.",
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
    "out; two of the four terms depend on $B$.)",
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


def _trust_ratio(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    w, g = rng.normal(size=(3, 3, 2, 4)), 0.01 * rng.normal(size=(3, 3, 2, 4))
    for what, w_, g_, decay, coefficient in (
        ("a convolution's weights", w, g, 0.1, 0.001),
        ("a bias without decay", w[0, 0, 0], g[0, 0, 0], 0.0, 0.02),
        ("a zero gradient with decay", w, 0 * g, 0.5, 0.001),
        ("a zero gradient without decay", w, 0 * g, 0.0, 0.001),
        ("weights that are all zero", 0 * w, g, 0.1, 0.001),
        ("weights and gradients that are all zero", 0 * w, 0 * g, 0.1, 0.001),
    ):
        above = coefficient * np.sqrt(np.sum(w_**2))
        below = np.sqrt(np.sum(g_**2)) + decay * np.sqrt(np.sum(w_**2))
        expected = above / below if above > 0 and below > 0 else 1.0
        if wrong := compare(f"The ratio for {what}", answer(w_, g_, decay, coefficient), expected):
            return wrong
    return None


trust_ratio = Exercise(
    id="batch_size_and_lars-trust_ratio",
    answer="paper_ratio",
    question=r"Write the trust ratio of the *paper*, with $\lVert g\rVert + \lambda\lVert w\rVert$ below the line, for "
    r"a tensor of any shape: $c\,\lVert w\rVert$ divided by it, and 1 where what stands above or what stands below the "
    "line is zero.",
    hints=(
        "The norm of a tensor is the square root of the sum of all its squares, whatever its shape.",
        "A zero gradient is no trouble as long as the decay is not zero: look at what stands below the line.",
    ),
    code="""
def paper_ratio(w, g, decay, coefficient):
    above = coefficient * np.sqrt(np.sum(w**2))
    below = np.sqrt(np.sum(g**2)) + decay * np.sqrt(np.sum(w**2))
    return above / below if above > 0 and below > 0 else 1.0
""",
    wrong=_trust_ratio,
    right="by the triangle inequality it is never larger than the ratio of the library, and equal without decay.",
)


def _steps_of_layers(answer: Any) -> str | None:
    return compare("The list of lengths", answer, [0.1 * 0.2, 0.1 * 5, 0.01 * 8, 0.01 * 2], tolerance=1e-3)


steps_of_layers = Exercise(
    id="batch_size_and_lars-steps_of_layers",
    answer="step_lengths",
    question=r"Two layers without decay. In the first $\lVert w\rVert = 8$ and $\lVert g\rVert = 0.2$, in the second "
    r"$\lVert w\rVert = 2$ and $\lVert g\rVert = 5$. How long is their first step with SGD at rate 0.1, and how "
    "long with LARS at rate 1 and trust coefficient 0.01? Give four numbers: SGD's first and second layer, "
    "LARS's first and second layer.",
    hints=(
        "SGD's step is the rate times the gradient.",
        "LARS's is rate · trust ratio · gradient: put in the trust ratio and see what cancels.",
    ),
    code="step_lengths = [0.1 * 0.2, 0.1 * 5, 0.01 * 8, 0.01 * 2]",
    wrong=_steps_of_layers,
    right="SGD moves the second layer by a quarter of its length; LARS moves both by the same hundredth of theirs.",
)


def _overflow(answer: Any) -> str | None:
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
