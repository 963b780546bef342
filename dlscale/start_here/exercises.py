"""The exercise of 00_start_here."""

from typing import Any

from dlscale.course.exercises import Exercise, compare


def _steps(answer: Any) -> str | None:
    return compare("The list of three numbers of steps", answer, [200, 10, 1])


steps = Exercise(
    id="start_here-steps",
    answer="steps",
    question="One pass through 3,000 examples with 15 on each machine: how many *steps* does it take with 1, 20 "
    "and 200 machines?",
    hints=(
        "All machines together make one step. How many examples does that step use?",
        "With one machine a step uses 15 examples, so a pass takes 3,000 / 15 steps.",
    ),
    code="steps = [3000 // (15 * n) for n in (1, 20, 200)]",
    wrong=_steps,
    right="more machines make fewer steps, and a network learns by steps.",
)
