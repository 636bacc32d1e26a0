"""How the ranges of attention begin in a profile; who reads one needs no torch."""

PREFIX = "burst: "
