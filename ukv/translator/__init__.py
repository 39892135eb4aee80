"""Addresses: from virtual page ids to block ids and write locations."""

from ukv.translator.batch import StepBatch as StepBatch
from ukv.translator.batch import TokenPlaces as TokenPlaces
from ukv.translator.batch import token_places as token_places
from ukv.translator.static_tables import Bucket as Bucket
from ukv.translator.static_tables import StaticTables as StaticTables
from ukv.translator.static_tables import make_static_tables as make_static_tables
from ukv.translator.static_tables import (
    refresh_static_tables as refresh_static_tables,
)
from ukv.translator.step_inputs import StepInputs as StepInputs
from ukv.translator.step_inputs import step_inputs as step_inputs
from ukv.translator.step_inputs import translated_step as translated_step
from ukv.translator.translator import KVIndexTable as KVIndexTable
from ukv.translator.translator import KVIndexTranslator as KVIndexTranslator
