"""Every explorer of a kernel, moved to its ends; also put into a notebook's own kernel as source."""

from __future__ import annotations

from dlscale.page import widgets


def picture(explorer: widgets.Explorer, values: dict) -> bytes:
    try:
        return explorer.draw(explorer.start | values)[0]
    except Exception as error:
        raise AssertionError(f"Explorer {widgets.explorers.index(explorer)} failed at {values}.") from error


def corners(ends: dict[str, tuple]) -> list[dict]:
    """Controls at their ends together, in few pictures: any two of them at all four pairs of their ends.

    Each control takes the parity of some bits of the row's number; those of other bits are independent (Rao 1947).
    """
    rows = range(2 ** len(ends).bit_length())
    return [{name: ends[name][(row & bits).bit_count() % 2] for bits, name in enumerate(ends, 1)} for row in rows]


def in_full(explorer: widgets.Explorer, values: dict) -> bytes:
    """The picture, drawn twice where only what moves was drawn: the second time all of it."""
    moved = picture(explorer, values)
    if explorer.background is not None and explorer.page.about["keeps"]:
        explorer.background = None
        if picture(explorer, values) != moved:
            order = widgets.explorers.index(explorer)
            raise AssertionError(f"Explorer {order} is not drawn in full at {values}: update must return all.")
    return moved


def check(together: bool = True) -> None:
    """Move every control of every explorer to its ends, alone and `together`, and each menu to all its entries.

    Raises AssertionError for a picture that cannot be drawn, for a control that never changed the picture, and for a
    picture that would be another one if all of it were drawn again: `update` moved what it did not return.
    """
    for order, explorer in enumerate(widgets.explorers):
        ends = {name: (control.values[0], control.values[-1]) for name, control in explorer.controls.items()}
        for name, control in explorer.controls.items():
            *others, last = control.values if control.kind == "menu" else ends[name]
            pictures = {picture(explorer, {name: value}) for value in others} | {in_full(explorer, {name: last})}
            if len(pictures) < 2:
                raise AssertionError(f"Control {name!r} of explorer {order} never changed the picture.")
        for values in corners(ends) if together else []:
            in_full(explorer, values)
