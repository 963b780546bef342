"""What a notebook of the course calls: claims, sentences and tables, what it says at its end; the map."""

from dlscale.course.claims import claim as claim
from dlscale.course.claims import summary as summary
from dlscale.course.contents import course_map as course_map
from dlscale.course.markup import say as say
from dlscale.course.markup import table as table
