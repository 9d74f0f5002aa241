#include "proxy/function/function.h"

namespace dxpu::function {

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::kSuccess:
      return "success";
    case Outcome::kUnsupportedRequest:
      return "unsupported request (UR)";
    case Outcome::kConfigRetry:
      return "configuration retry (CRS)";
    case Outcome::kCompleterAbort:
      return "completer abort (CA)";
    case Outcome::kTimeout:
      return "completion timeout (CTO)";
    case Outcome::kPoisoned:
      return "poisoned";
    case Outcome::kLinkDown:
      return "link down";
  }
  return "unknown outcome";
}

}  // namespace dxpu::function
