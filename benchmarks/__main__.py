"""Every benchmark, one after another: `make bench`."""

from benchmarks import convert, step_speed


def main() -> None:
    """Runs them; each writes its own page."""
    convert.main()
    step_speed.main()


if __name__ == "__main__":
    main()
