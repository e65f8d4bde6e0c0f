"""The shapes of Llama 3 8B, for tests of forecasts."""

from naranhi.planning import Model

LLAMA = Model(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    tied=False,
    vocabulary=128256,
)
