"""What a notebook of the course calls: claims, and what it says at its end; the map of the notebooks."""

from dlscale.course.claims import claim as claim
from dlscale.course.claims import claims_table as claims_table
from dlscale.course.claims import summary as summary
from dlscale.course.claims import verdicts as verdicts
from dlscale.course.contents import course_map as course_map
