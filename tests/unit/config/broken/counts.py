"""Metrics and a step that broken study files name; this is not broken."""


class Silent:
    """Can't be called."""


class Counted:
    """A metric that is updated, computed and reset."""

    def reset(self):
        self.value = 0.0

    def update(self, outputs, targets):
        self.value += float((outputs - targets).abs().sum())

    def compute(self):
        return self.value


def step(model, batch):
    return {"loss": model(batch[0]).mean(), "kl": 0.0}


step.records = ("kl",)
