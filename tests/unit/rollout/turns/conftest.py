"""Trainers whose engine says what is written down."""

from tests.support.speaking_trainers import make, model

__all__ = ["make", "model"]
