"""Stand-ins for engines and for what starts them."""


class MadeUpHost:
    """Stands where `HostProcess` does."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.runs = True

    def is_running(self) -> bool:
        return self.runs

    def close(self) -> None:
        self.runs = False
