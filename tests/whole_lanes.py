"""Lanes of fake targets, which have no pages: everything stays where it is."""

from luceasync.pipeline.paging import WholeLanes


class PagelessLanes(WholeLanes):
    """Answers as lanes with a page for every chunk do."""

    def __init__(self) -> None:
        """Without pages, passes or nodes."""
