"""Decides: a pure state machine (:mod:`machine`) and the loop around it (:mod:`service`)."""
