"""
The command `trl-rollout-corr report`: a run or a dump as one page, or two against each other. It works in four
passes:

`run` reads the files of a run. `facts` computes its state, the findings and the diagnosis. `compose` turns them into
a page, which is data. `html_page` writes the page as HTML, `drawing` as a picture.
"""
