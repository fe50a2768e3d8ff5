"""Tokenizers that several tests read."""

from pathlib import Path

import pytest
from hypothesis import settings

from quickturn.files.resolve import embedded_model
from quickturn.text.tokenizer import Tokenizer, load_tokenizer

# Other work on the machine must not fail a test; nor may a search find today what it missed yesterday.
settings.register_profile("patient", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def smollm_file() -> Path:
    return embedded_model()


@pytest.fixture(scope="session")
def smollm(smollm_file: Path) -> Tokenizer:
    return load_tokenizer(str(smollm_file))
