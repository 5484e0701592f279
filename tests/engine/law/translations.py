"""The tables' tokens in another vocabulary: other ids, one token that it lacks, one that only it has."""

from engine.drafters.translation import Spellings, Translation
from tests.engine.law.tables import END

TABLE_WORDS = Spellings({0: b"A", 1: b"B", 2: b"AB"}, {END: "<end>"})
OTHER_WORDS = Spellings({0: b"B", 1: b"?", 2: b"A"}, {3: "<end>"})
TABLE_TRANSLATION = Translation(TABLE_WORDS, OTHER_WORDS)
