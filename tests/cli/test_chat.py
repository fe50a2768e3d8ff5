"""What `quickturn chat` samples with, and what a conversation keeps."""

import pytest

from quickturn.cli.chat import sampling_of


@pytest.mark.parametrize(
    ("model", "chosen", "expected"),
    [
        ({}, {}, {"temperature": 0.2, "top_p": 0.9}),
        ({"top_k": 20}, {}, {"temperature": 0.2, "top_p": 0.9, "top_k": 20}),
        ({"temperature": 0.6}, {}, {"temperature": 0.6}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.95}),
        ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}),
    ],
)
def test_the_user_goes_before_the_model_and_both_before_us(
    model: dict[str, float], chosen: dict[str, float], expected: dict[str, float]
) -> None:
    assert sampling_of(model, chosen) == expected
