"""The colours of ranks, and the colours and names of the kinds of action."""

# One colour per rank throughout the book: distinguishable with every kind of colour blindness, and
# with a contrast of 3 or more both on white and on a dark page (a test computes both).
COLORS = ("#1f84ea", "#cb5209", "#2e8166", "#b45ab6")

# Kind of action -> its name in the key, and its colour: the hues of the ranks' colours, light or
# dark enough for both pages, so that forward, backward and the gradient of the weights are
# also told apart in grey, on paper or e-ink. In grey an update looks like the gradient of the
# weights, next to which it never appears.
KINDS = {
    "F": ("forward", "#3f96ed"),
    "B": ("backward", "#aa4408"),
    "I": ("input gradient", "#aa4408"),
    "W": ("weight gradient", "#31896c"),
    "U": ("update", "#b257b4"),
    "UNSHARD": ("unshard", "#b257b4"),
    "REDUCE_GRAD": ("reduce", "#0f6e78"),
    "RESHARD": ("reshard", "#939393"),
}
