// file: enters, leaves and suspends regions
#pragma once

#include "region/frames.h"
#include "region/region_spec.h"

#include <cstddef>
#include <memory>
#include <optional>

namespace torch_promote {

// The owner of regions that a traced graph opens. If an op of the graph raises, the graph does not end them. They then
// end with the region around them.
constexpr const void* kGraphOwner = nullptr;

// Opens a region in this thread. `owner` identifies the object that opens it; it is compared, never dereferenced.
void enter_region(const void* owner, const RegionSpec& spec);

// Ends the innermost open region of `owner` in this thread, and returns it. Returns nullopt, and changes nothing, if
// there is none. Regions that were opened later stay open, and the state afterwards is what they and the regions around
// ask for.
std::optional<Frame> exit_region(const void* owner);

// The owner of the innermost open region of `promotion` in this thread, or null.
const void* innermost_promotion_region();

// The number of open regions in this thread.
size_t depth();

// A step of a coroutine may end inside its regions. `suspend` removes the regions above `base` from this thread and
// restores the state around them; `resume` enters them again, on top of the thread's state at that time.
struct Suspended;
std::shared_ptr<Suspended> suspend(size_t base);
void resume(const Suspended& regions);

} // namespace torch_promote
