"""Pretrained models made linear: ``linattn.linearize(model, method="still", ...)`` and its parts."""
