"""Trainers as for conversations."""

from tests.unit.conversations.conftest import make, model

__all__ = ["make", "model"]
