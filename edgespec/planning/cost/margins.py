"""How much has to be gained, or may be lost, before a decision changes: every threshold of the plan."""

# A configuration that slows plain decoding by more than this has to be repaid by a predicted gain (DESIGN.md,
# "Numeric class"), and the reasons report it. Repeated measurements differ by 2 to 3 % on a quiet machine.
SLOWER_ALLOWED = 1.03

# 95 % of a normal distribution are this many standard errors around the mean.
NORMAL_95 = 1.96

# A drafter that would gain no more than this with every token right is not tried: a curve may be off by that much.
# Pipelined drafting has to be faster than serial drafting by this factor as well.
DRAFT_MARGIN = 1.02

# Serial drafting with copies and second choices in one tree is this many times as fast as with chains alone (unseen
# prompts: docs/results/drafting.md). The pipelined loop has chains only, and forecasts count neither.
TREES_GAIN = 1.08

# The target moves to another runtime or device that is faster by this factor in this many calibrations in a row. Two
# days' calibrations of one machine differed by up to 8 %, and each move changes texts.
TAKEOVER_MARGIN = 1.10
TAKEOVER_CALIBRATIONS = 2

# Drafting as assumed wherever the target could run: a drafter token takes a fifth of a plain step (0.5B for 1.5B: 8.1
# of 38 ms on two cores) and is right as often as usual (acceptance.UNKNOWN). The actual drafter is ignored, so that
# it cannot move the target.
USUAL_DRAFT_SHARE = 0.2


def t_95(freedom: int) -> float:
    """95 % of Student's t are within this, by Cornish and Fisher's expansion (Abramowitz and Stegun, 1964, 26.7.5).

    Within 1 % of the tables from 2 degrees of freedom on; of 1 degree it is 11.3 where they have 12.7.
    """
    z, n = NORMAL_95, 4.0 * freedom
    first = (z**3 + z) / n
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (6.0 * n**2)
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (6.0 * n**3)
    fourth = (79.0 * z**9 + 776.0 * z**7 + 1482.0 * z**5 - 1920.0 * z**3 - 945.0 * z) / (360.0 * n**4)
    return z + first + second + third + fourth
