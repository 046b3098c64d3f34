"""How much has to be gained, or may be lost, before a decision changes: every threshold of the plan."""

# A configuration that costs plain decoding more than this has to be repaid by a predicted gain (DESIGN.md, "Numeric
# class"), and the reasons say so. Repeated measurements of the same thing differ by 2 to 3 % on a quiet machine.
SLOWER_ALLOWED = 1.03

# A drafter that would gain no more than this if it were always right is not tried: such a gain is within what a
# measurement of a curve may be off. Target and drafter at the same time have to be faster than in turns by as much.
DRAFT_MARGIN = 1.02

# Another place (a runtime or a device) takes the target over where it is faster by this factor in so many
# calibrations in a row that agree. Calibrations of one machine on two days differed by up to 8 %, and each change of
# place changes texts.
TAKEOVER_MARGIN = 1.10
TAKEOVER_CALIBRATIONS = 2

# What drafting is taken to bring a target wherever it runs, when places are compared: a drafter whose token takes a
# fifth of a plain step (0.5B for 1.5B: 8.1 of 38 ms on two cores), right in as many cases as is usual
# (acceptance.UNKNOWN). Which drafter there is does not enter, so that it cannot move the target.
USUAL_DRAFT_SHARE = 0.2
