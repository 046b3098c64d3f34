"""How much has to be gained, or may be lost, before a decision changes."""

# A configuration that costs plain decoding more than this has to be repaid by a predicted gain (DESIGN.md, "Numeric
# class"), and the reasons say so.
SLOWER_ALLOWED = 1.03

# A gain smaller than this is within what a measurement of a curve may be off, and is not worth a drafter's work.
DRAFT_MARGIN = 1.02

# What a plan must be predicted to gain before it replaces plain decoding. Repeated measurements of the same thing
# differ by 2 to 3 % on a quiet machine: a smaller gain cannot be told from none.
PLAN_MARGIN = 0.03
