"""Swaps a token's weakest expert for the best one in memory, if reading it can be avoided."""

from routeahead import Policy, Routing


class Swap(Policy):
    name = "swap"

    def __init__(self) -> None:
        self.swapped = 0

    def routed(self, routing: Routing) -> None:
        if routing.phase != "decode" or routing.resident(int(routing.ids[0, -1])):
            return
        chosen, scores = routing.ids[0].tolist(), routing.scores()
        if scores is None:  # a table gives each token its experts
            return
        for expert in (-scores[0]).argsort().tolist():
            if expert not in chosen and routing.resident(expert):
                routing.choose([*chosen[:-1], expert], row=0)
                self.swapped += 1
                return

    def report(self, decode: object) -> dict[str, int]:
        return {"swapped": self.swapped}
