"""The page about the control plane says what the code does."""

from pathlib import Path

import quickturn_control as qc
from quickturn_control.diagram import mermaid, rewritten

PAGE = Path(__file__).parents[2] / "docs" / "control-plane.md"


def test_diagram_is_current() -> None:
    """`python -m quickturn_control.diagram docs/control-plane.md` rewrites it."""
    text = PAGE.read_text()
    assert mermaid() in text
    assert rewritten(text) == text


def test_page_names_every_state_and_figure() -> None:
    """A state or a metric that isn't explained isn't done."""
    text = PAGE.read_text()
    for source, _, target in qc.transitions():
        assert f"`{source}`" in text
        assert f"`{target}`" in text
    scheduler = qc.Scheduler(
        qc.SchedulerConfig(
            groups=[qc.GroupConfig("full", 4)], num_slabs=4, tiers=[qc.TierConfig("host", [4])]
        )
    )
    for name in scheduler.stats():
        assert f"`{name.replace('tier_1', 'tier_N').replace('group_0', 'group_G')}`" in text, name
