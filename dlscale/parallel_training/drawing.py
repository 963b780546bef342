"""Figures and explorers of 09_parallel_training and its further notebook: a line in the notebook calls each."""

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from dlscale.page import figures, widgets
from dlscale.page.curves import curves as curves
from dlscale.parallel_training import pipeline

KINDS = {"GPipe": ("gpipe", 1), "1F1B": ("1f1b", 1), "interleaved, 2 chunks": ("interleaved", 2)}
KINDS |= {"interleaved, 4 chunks": ("interleaved", 4), "pipelined backpropagation": ("pipelined", 1)}


def pipe(kind: str, stages: int, times: int, backward: float) -> pipeline.Schedule:
    """The schedule with `times` as many micro-batches as stages; a forward pass of a stage takes 1."""
    name, chunks = KINDS[kind]
    return pipeline.pipeline_schedule(name, stages, stages * times, chunks, 1 / chunks, backward / chunks)


def pipelines() -> None:
    """Explore who does what when in a pipeline."""

    colors = {pipeline.FORWARD: figures.SKY, pipeline.BACKWARD: figures.BLUE}

    def paint(ax: Axes, kind: str, stages: int, times: int, backward: int) -> None:
        found = pipe(kind, stages, times, backward)
        for task in found.tasks:
            color = to_rgba(colors[task.what], 1 - 0.6 * task.chunk / found.chunks)
            box = {"color": color, "edgecolor": "white", "linewidth": 0.4}
            ax.barh(task.worker, task.end - task.start, 0.8, left=task.start, **box)
            if len(found.tasks) <= 64:
                at = (task.start + task.end) / 2, task.worker
                shade = "white" if task.what == pipeline.BACKWARD and not task.chunk else figures.BLACK
                ax.text(*at, f"{task.microbatch}", ha="center", va="center", fontsize=8, color=shade)
        for worker, count in enumerate(found.alive()):
            ax.text(found.time * 1.01, worker, f"stores {count}", va="center", fontsize=9)
        for place, (name, color) in enumerate(zip(("forward", "backward"), colors.values(), strict=True)):
            ax.text(0.02 + 0.13 * place, 1.03, name, color=color, weight="bold", transform=ax.transAxes)
        ax.set(ylabel="worker", xlabel="time (forward passes of a stage)", title=f"bubble {100 * found.bubble:.0f} %")
        ax.set(ylim=(stages - 0.5, -0.5), xlim=(0, found.time * 1.13), yticks=range(stages))
        ax.grid(visible=False)

    def caption(kind: str, stages: int, times: int, backward: int) -> str:
        found = pipe(kind, stages, times, backward)
        what = "chunks" if found.chunks > 1 else "stage"
        return (
            f"{kind}, {stages} stages, {stages * times} micro-batches, backward time {backward}: workers wait "
            f"{100 * found.bubble:.0f} % of the time. The first worker stores up to {found.alive()[0]} inputs of its "
            f"{what}, the last {found.alive()[-1]}."
        )

    widgets.explore_axes(
        paint, alt=caption, height=3.2, kind=widgets.menu("schedule", [*KINDS], "1F1B"),
        stages=widgets.slider("stages", [2, 3, 4, 6, 8], 4),
        times=widgets.slider("micro-batches per stage", [1, 2, 3, 4], 2),
        backward=widgets.slider("time of a backward pass", [1, 2, 3], 1),
    )  # fmt: skip
