"""What the ranks printed and displayed, as a reader sees it below the cell."""

import sys

from naranhi.world.errors import named


def show(outcomes):
    """Show what ranks printed and displayed: in rank order, equal neighbours folded."""
    ordered = sorted(outcomes.items())
    folded = []
    for rank, outcome in ordered:
        shown = (outcome["stdout"], outcome["stderr"], outcome["displays"])
        if folded and folded[-1][1] == shown and folded[-1][0][-1] == rank - 1:
            folded[-1][0].append(rank)
        else:
            folded.append(([rank], shown))
    for ranks, (stdout, stderr, displays) in folded:
        label = f"[{named(ranks)}]"
        texts = [d["text/plain"] for d, _ in displays if set(d) == {"text/plain"}]
        for stream, text in ((sys.stdout, stdout), (sys.stderr, stderr)):
            for line in text.splitlines():
                print(label, line, file=stream)
        for text in texts:
            for line in text.splitlines():
                print(label, line)
        rich = [(data, metadata) for data, metadata in displays if set(data) != {"text/plain"}]
        if rich:
            from IPython.display import display

            print(label)
            for data, metadata in rich:
                display(data, raw=True, metadata=metadata)
