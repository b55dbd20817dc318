// file: whether a promotion rule acts on the calls of this thread
#pragma once

namespace torch_promote {

// What ops inside a promoting op do is the op's own affair, and so are backward formulas.
struct PromotionState {
  bool inside = false; // a promoting op, or a hook of ours
  // The backward in which the innermost region was entered, -1 for none: the rule acts there, and not in the backwards
  // that begin in the region. (Checkpointing enters regions in a backward, to run a forward again.)
  int graph_task = -1;
};

inline thread_local PromotionState tls_promotion;

class InsidePromoted {
 public:
  InsidePromoted() : before_(tls_promotion.inside) {
    tls_promotion.inside = true;
  }
  InsidePromoted(const InsidePromoted&) = delete;
  InsidePromoted& operator=(const InsidePromoted&) = delete;
  InsidePromoted(InsidePromoted&&) = delete;
  InsidePromoted& operator=(InsidePromoted&&) = delete;
  ~InsidePromoted() {
    tls_promotion.inside = before_;
  }

 private:
  bool before_;
};

} // namespace torch_promote
