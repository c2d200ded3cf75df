"""Certificates: what is proved about a point, from the problem and the point alone."""

from newtention.certify.certificate import Basin, Certificate, Flat
from newtention.certify.compose import certify

__all__ = ["Basin", "Certificate", "Flat", "certify"]
