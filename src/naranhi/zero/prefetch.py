"""Which unit comes next: remembered from the pass before, so that it can be on its way in time."""


class Prefetch:
    """The order in which units are needed: one for passes with a backward, one for forwards alone.

    recording: which of the two is under way.
    """

    def __init__(self):
        self._orders = {True: [], False: []}
        self.begin(True)

    def begin(self, recording):
        self.recording, self._trace = recording, []

    def end(self):
        self._orders[self.recording], self._trace = self._trace, []

    def after(self, unit):
        """`unit` is needed now. The one after it, if so far all has been as in the pass before."""
        self._trace.append(unit)
        order, place = self._orders[self.recording], len(self._trace)
        return order[place] if place < len(order) and order[:place] == self._trace else None
