"""A pytest plugin: of a mutant only matters that some example fails, not which is the smallest."""

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None, deadline=None)
settings.load_profile("mutants")
