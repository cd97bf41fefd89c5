"""Load tests of any OpenAI server: arrivals, workloads, open-loop client, measures.

| module      | what it holds                                                                            |
|-------------|------------------------------------------------------------------------------------------|
| `arrivals`  | when requests are due: Poisson, or a recorded trace                                       |
| `workloads` | what they ask: seeded generators over drawn pages                                         |
| `bodies`    | from an ask to a request's body; images inline, or uploaded once and named                |
| `client`    | one request, streamed and timed; a schedule sent whatever is outstanding                  |
| `measures`  | percentiles, goodput, throughput, hit rates                                               |
| `progress`  | the run as it goes, in a terminal or as plain lines                                       |
| `report`    | the JSON of a run, and one picture of several                                             |
| `session`   | a whole load test: rate after rate, each warmed up and drained                            |
"""
