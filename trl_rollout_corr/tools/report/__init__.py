"""
A run or a dump as one page, or two against each other: `trl-rollout-corr report`. In three passes:

`facts` computes the state, the findings and the diagnosis of a run; `compose` makes a page of them,
which is data; `html_page` writes the page as HTML, `drawing` as a picture.
"""
