"""Trainers whose engine says what is written down."""

from tests.support.speaking_trainers import make, model, script

__all__ = ["make", "model", "script"]
